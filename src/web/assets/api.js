// The native API of this server. Every failure is an ApiError whose message is meant for people.

import { events } from "./sse.js";

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let apiKey = "";

export function setApiKey(key) {
  apiKey = key;
}

async function request(path, body, signal) {
  const headers = {};
  if (apiKey) headers["Authorization"] = `Bearer ${apiKey}`;
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    options.method = "POST";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  let message = `The server refused with status ${response.status}.`;
  let code;
  try {
    const { error } = await response.json();
    message = sentence(typeof error === "string" ? error : error.message);
    code = error.code;
  } catch {
    // The body says nothing; the status has to do.
  }
  throw new ApiError(message, response.status, code);
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

export async function health() {
  return (await request("/health")).json();
}

export async function stats() {
  return (await request("/stats")).json();
}

// The token ids of a conversation through the model's chat template.
export async function tokenize(messages, signal) {
  return (await (await request("/tokenize", { messages }, signal)).json()).tokens;
}

const texts = new Map();

// The text of one token; asked for once.
export function tokenText(id) {
  if (!texts.has(id)) {
    const text = request("/detokenize", { tokens: [id] })
      .then((response) => response.json())
      .then(({ text }) => text);
    text.catch(() => texts.delete(id));
    texts.set(id, text);
  }
  return texts.get(id);
}

// Yields {token_id, text, logprobs} for each token, then {done: {finish_reason, tokens_generated, text}}.
export async function* generate(body, signal) {
  const response = await request("/v1/generate/stream", body, signal);
  try {
    for await (const { name, data } of events(response)) {
      const value = JSON.parse(data);
      if (name === "token") yield value;
      if (name === "done") {
        yield { done: value };
        return;
      }
      if (name === "error") {
        const { error } = value;
        throw new ApiError(sentence(typeof error === "string" ? error : error.message), 200);
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new ApiError("The connection broke.", 0);
    throw error;
  }
  throw new ApiError("The connection broke before the answer was complete.", 0);
}
