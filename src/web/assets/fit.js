// Which turns of a conversation the server takes.

// So many of the oldest of these turns go next when the server refused the conversation as too long; the last one stays.
export function older(turns) {
  return Math.ceil((turns.length - 1) / 2);
}

export function isTooLong(error) {
  return error.code === "context_length_exceeded";
}

// Whether a prompt and so many new tokens are within what the server told; an older one told its context only.
export function holds(health, tokens, most) {
  if (!health) return true;
  const sequence = health.max_sequence_tokens ?? health.context;
  return tokens <= (health.max_prompt_tokens ?? tokens) && tokens + most <= sequence;
}

// The token ids of the turns, and the turns without the oldest ones that did not fit.
export async function fitting(turns, tokenize, fits) {
  let shown = turns;
  for (;;) {
    try {
      const tokens = await tokenize(shown);
      if (fits(tokens.length) || shown.length === 1) return { tokens, shown };
      shown = shown.slice(1);
    } catch (error) {
      if (!isTooLong(error) || shown.length === 1) throw error;
      shown = shown.slice(older(shown));
    }
  }
}
