// One question and its answer: the elements on the page and the record that later requests and the check need.

import { Pace, rateText, timeText } from "./gauges.js";
import * as probe from "./probe.js";

function make(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

// How unsure the model was, in five levels: 0 for a share of 90 % or more, 4 below 10 %.
function doubt(tokens) {
  const share = Math.exp(tokens.reduce((sum, token) => sum + (token.logprobs?.logprob ?? 0), 0));
  return [0.9, 0.6, 0.3, 0.1].filter((bound) => share < bound).length;
}

export class Turn {
  constructor(prompt) {
    this.prompt = prompt;
    this.answer = "";
    this.ids = [];
    this.body = null;
    this.pace = new Pace();
    this.held = [];
    this.leftOut = 0;
    this.build();
  }

  build() {
    this.element = make("li", "turn");
    const question = make("article", "question");
    question.append(make("h3", "unseen", "You"), make("p", "text", this.prompt));
    this.reply = make("article", "reply");
    this.reply.setAttribute("aria-busy", "true");
    this.text = make("div", "text");
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", "Answer; the arrow keys walk over its tokens");
    this.remark = make("p", "remark", "Waiting for the first token");
    this.actions = make("div", "actions");
    this.actions.hidden = true;
    const foot = make("div", "foot");
    foot.append(this.remark, this.actions);
    this.reply.append(make("h3", "unseen", "Model"), this.text, foot);
    this.element.append(question, this.reply);
    this.text.addEventListener("pointerover", (event) => this.point(event.target));
    this.text.addEventListener("pointerleave", () => probe.hide());
    this.text.addEventListener("keydown", (event) => this.walk(event));
    this.text.addEventListener("blur", () => {
      this.at = null;
      probe.hide();
    });
  }

  // Text may be held back until a character or a stop string is decided; its tokens then share the span that shows it.
  token(token) {
    this.pace.token();
    this.ids.push(token.token_id);
    this.held.push(token);
    if (token.text !== "") this.release(token.text);
    this.say();
  }

  release(text) {
    const span = make("span", `t d${doubt(this.held)}`, text);
    span.tokens = this.held;
    this.held = [];
    this.answer += text;
    this.text.append(span);
  }

  done({ finish_reason, tokens_generated, text }) {
    if (text) this.release(text);
    this.end(finish_reason === "length" ? "reached the most tokens" : finish_reason, tokens_generated);
  }

  stopped() {
    this.end("stopped by you", this.ids.length);
  }

  failed(message) {
    this.end("", this.ids.length);
    this.reply.insertBefore(make("p", "error", message), this.remark.parentElement).setAttribute("role", "alert");
    if (this.ids.length === 0) this.remark.textContent = "";
  }

  end(reason, tokens) {
    this.reply.setAttribute("aria-busy", "false");
    this.actions.hidden = this.ids.length === 0;
    this.say(reason, tokens);
  }

  say(reason = "", tokens = this.ids.length) {
    const parts = [`${tokens} token${tokens === 1 ? "" : "s"}`];
    if (this.pace.rate !== null) parts.push(rateText(this.pace.rate));
    if (this.pace.ttft !== null) parts.push(`first after ${timeText(this.pace.ttft)}`);
    if (reason) parts.push(reason);
    if (this.leftOut) parts.push(`the ${this.leftOut === 1 ? "oldest turn" : `${this.leftOut} oldest turns`} did not fit`);
    this.remark.textContent = parts.join(" · ");
    this.pace.show();
  }

  addAction(name, label, act) {
    const button = make("button", "quiet small", name);
    button.type = "button";
    button.setAttribute("aria-label", label);
    button.addEventListener("click", () => act(button));
    this.actions.append(button);
    return button;
  }

  point(target) {
    if (target.tokens) probe.show(target);
  }

  // Left and right walk over the tokens, Home and End go to the first and last, Escape leaves them.
  walk(event) {
    const spans = this.text.children;
    const at = this.at ?? -1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (event.key === "Escape" && this.at !== null) {
      this.at = null;
      probe.hide();
    }
    if (to === undefined || spans.length === 0) return;
    event.preventDefault();
    this.at = Math.min(Math.max(0, to), spans.length - 1);
    const span = spans[this.at];
    span.scrollIntoView({ block: "nearest" });
    probe.show(span);
    probe.announce(span);
  }
}
