// The page: conversation, composer, live figures. One answer at a time; stopping it aborts its request, which cancels it on the
// server.

import * as api from "./api.js";
import { fitting, holds, isTooLong, older } from "./fit.js";
import { ServerGauges } from "./gauges.js";
import * as probe from "./probe.js";
import { Settings } from "./settings.js";
import { Turn } from "./turn.js";

const LOGPROBS = 5;
const POLL_MS = 1000;

const element = (id) => document.getElementById(id);
const conversation = element("conversation");
const message = element("message");
const settings = new Settings();
const gauges = new ServerGauges();

let turns = [];
let running = null;
let health = null;

// Conversation

function messages(shown) {
  const list = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const turn of shown) {
    list.push({ role: "user", content: turn.prompt });
    if (turn.answer !== "") list.push({ role: "assistant", content: turn.answer });
  }
  return list;
}

// Answers the turn from the conversation, without the oldest turns that the server does not take. A turn without an answer is left
// out: a template does not expect two questions in a row.
async function answer(turn, signal) {
  const sampling = settings.body();
  const all = turns.filter((other) => other === turn || other.answer !== "");
  const tokenize = (shown) => api.tokenize(messages(shown), signal);
  const fits = (tokens) => holds(health, tokens, sampling.max_tokens);
  let shown = all;
  for (;;) {
    let tokens;
    ({ tokens, shown } = await fitting(shown, tokenize, fits));
    turn.leftOut = all.length - shown.length;
    turn.body = { prompt_tokens: tokens, ...sampling, logprobs: LOGPROBS };
    try {
      for await (const item of api.generate(turn.body, signal)) {
        following(() => (item.done ? turn.done(item.done) : turn.token(item)));
      }
      return;
    } catch (error) {
      if (!isTooLong(error) || turn.ids.length > 0 || shown.length === 1) throw error;
      shown = shown.slice(older(shown));
    }
  }
}

async function ask(prompt) {
  const controller = new AbortController();
  const turn = new Turn(prompt);
  turns.push(turn);
  element("welcome").hidden = true;
  element("turns").append(turn.element);
  setRunning(controller);
  conversation.scrollTop = conversation.scrollHeight;
  try {
    await answer(turn, controller.signal);
  } catch (error) {
    following(() => fail(turn, error));
  }
  if (running === controller) setRunning(null);
  addActions(turn);
  following(() => {});
}

function fail(turn, error) {
  if (error.name === "AbortError") return turn.stopped();
  if (error.status === 401) element("key-row").hidden = false;
  turn.failed(error.message);
  if (turn.ids.length === 0 && message.value === "") message.value = turn.prompt;
}

function addActions(turn) {
  if (turn.ids.length === 0) return;
  // Browsers offer the clipboard to secure pages only, and to this machine.
  if (navigator.clipboard) {
    turn.addAction("Copy", "Copy the answer", async (button) => {
      await navigator.clipboard.writeText(turn.answer);
      button.textContent = "Copied";
    });
  }
  turn.addAction("Check", "Answer again and compare the tokens", (button) => check(turn, button));
}

// Sends the same request again and compares token by token; an answer that was stopped is compared as far as it went.
async function check(turn, button) {
  if (running) return;
  const controller = new AbortController();
  setRunning(controller);
  button.textContent = "Checking";
  button.classList.remove("good", "bad");
  let at = 0;
  let verdict = null;
  try {
    for await (const item of api.generate(turn.body, controller.signal)) {
      if (item.done || at === turn.ids.length) break;
      if (item.token_id !== turn.ids[at]) {
        verdict = `Differs at token ${at + 1}`;
        break;
      }
      at += 1;
    }
    verdict ??= at === turn.ids.length ? `Same ${at} token${at === 1 ? "" : "s"}` : `Only ${at} tokens`;
    button.classList.add(verdict.startsWith("Same") ? "good" : "bad");
  } catch (error) {
    verdict = error.name === "AbortError" ? "Check" : "Check failed";
  }
  controller.abort();
  button.textContent = verdict;
  element("announcer").textContent = verdict;
  if (running === controller) setRunning(null);
}

// Keeps the end in view while text arrives, unless the reader has scrolled up.
function following(change) {
  const atEnd = conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 48;
  change();
  if (atEnd) conversation.scrollTop = conversation.scrollHeight;
}

function setRunning(controller) {
  running = controller;
  element("send").hidden = controller !== null;
  element("stop").hidden = controller === null;
  document.documentElement.classList.toggle("running", controller !== null);
}

function stop() {
  running?.abort();
}

function newChat() {
  stop();
  turns = [];
  element("turns").replaceChildren();
  element("welcome").hidden = false;
  probe.hide();
  message.focus();
}

// Composer

function send() {
  const prompt = message.value.trim();
  if (running || prompt === "") return;
  if (!settings.valid()) return;
  message.value = "";
  fit();
  ask(prompt);
  message.focus();
}

// The box grows with its text up to what the style allows.
function fit() {
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight + 2}px`;
}

element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
message.addEventListener("input", fit);
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
element("stop").addEventListener("click", () => {
  stop();
  message.focus();
});
element("new-chat").addEventListener("click", newChat);
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    message.value = example.textContent;
    send();
  });
}
// A page that is left may be kept alive for the way back: its answer must not be.
window.addEventListener("pagehide", stop);
element("api-key").addEventListener("change", (event) => api.setApiKey(event.target.value));
conversation.addEventListener("scroll", () => probe.hide(), { passive: true });

// Panel

function setPanel(open) {
  document.documentElement.classList.toggle("panel-open", open);
  element("panel-toggle").setAttribute("aria-expanded", String(open));
}

element("panel-toggle").addEventListener("click", () => {
  setPanel(element("panel-toggle").getAttribute("aria-expanded") !== "true");
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) return stop();
  if (element("panel-toggle").getAttribute("aria-expanded") === "true") {
    setPanel(false);
    element("panel-toggle").focus();
  }
});

// Live figures

function setStatus(state, text) {
  if (element("status").dataset.state === state) return;
  element("status").dataset.state = state;
  element("status-text").textContent = text;
}

async function look() {
  try {
    health = await api.health();
    element("model").textContent = [health.model, health.device, health.profile].filter(Boolean).join(" · ");
    setStatus("ready", "Ready");
    gauges.show(await api.stats(), health);
  } catch (error) {
    if (error.status === 401) element("key-row").hidden = false;
    else setStatus("away", error.status === 503 ? "Not ready" : "No answer");
    gauges.clear();
  }
}

async function watch() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

watch();
// On a touch screen the focus would open the keyboard over the page.
if (!matchMedia("(pointer: coarse)").matches) message.focus();
