// The probabilities of a token, beside it: under the pointer, or for the token that the arrow keys chose.

import { tokenText } from "./api.js";

const probe = document.getElementById("probe");
const announcer = document.getElementById("announcer");
let shownFor = null;

export function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  if (share >= 99.95) return "100 %";
  return share < 0.1 ? "under 0.1 %" : `${share.toFixed(1)} %`;
}

// Blanks and line feeds as one can see them.
function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

function line(className, text, logprob) {
  const row = document.createElement("div");
  row.className = className;
  const [name, bar, share] = ["span", "i", "span"].map((tag) => row.appendChild(document.createElement(tag)));
  name.textContent = text;
  bar.appendChild(document.createElement("b")).style.width = `${100 * Math.exp(logprob)}%`;
  share.textContent = percent(logprob);
  return { row, name };
}

// `span.tokens` holds the tokens whose text the span shows: usually one, several where a character was split over them.
export function show(span) {
  if (shownFor === span) return;
  hide();
  shownFor = span;
  span.classList.add("chosen");
  const tokens = span.tokens.filter((token) => token.logprobs);
  if (tokens.length === 0) return;
  probe.replaceChildren();
  const last = tokens.at(-1);
  if (tokens.length > 1) {
    const title = probe.appendChild(document.createElement("p"));
    title.textContent = `Text of ${tokens.length} tokens`;
    tokens.forEach((token, at) => {
      probe.append(line("chosen", `part ${at + 1}`, token.logprobs.logprob).row);
    });
  } else {
    const { logprob, top } = last.logprobs;
    if (!top.some(({ token_id }) => token_id === last.token_id)) {
      probe.append(line("chosen", visible(span.textContent), logprob).row);
    }
    for (const other of top) {
      const isChosen = other.token_id === last.token_id;
      const { row, name } = line(isChosen ? "chosen" : "", isChosen ? visible(span.textContent) : "…", other.logprob);
      probe.append(row);
      if (!isChosen) tokenText(other.token_id).then((text) => (name.textContent = visible(text)), () => {});
    }
  }
  probe.hidden = false;
  place(span);
}

function place(span) {
  const mark = span.getClientRects()[0];
  if (!mark) return;
  const box = probe.getBoundingClientRect();
  const left = Math.min(Math.max(8, mark.left), document.documentElement.clientWidth - box.width - 8);
  const above = mark.top - box.height - 8;
  const top = document.getElementById("conversation").getBoundingClientRect().top;
  probe.style.left = `${left}px`;
  probe.style.top = `${above >= top ? above : mark.bottom + 8}px`;
}

export function hide() {
  shownFor?.classList.remove("chosen");
  shownFor = null;
  probe.hidden = true;
}

// For who listens instead of looking.
export function announce(span) {
  const tokens = span.tokens.filter((token) => token.logprobs);
  const total = tokens.reduce((sum, token) => sum + token.logprobs.logprob, 0);
  announcer.textContent = tokens.length ? `${span.textContent}: ${percent(total)}` : span.textContent;
}
