// The live figures: the server's from /stats, the pace of the answer from its own tokens.

const element = (id) => document.getElementById(id);
const SAMPLES_KEPT = 60;

function setGauge(id, value, most) {
  const gauge = element(id);
  gauge.setAttribute("aria-valuemax", most);
  gauge.setAttribute("aria-valuenow", value);
  gauge.firstElementChild.style.width = `${most > 0 ? (100 * value) / most : 0}%`;
}

export function rateText(rate) {
  return rate === null ? "–" : `${rate.toFixed(rate < 100 ? 1 : 0)} tok/s`;
}

export function timeText(ms) {
  return ms === null ? "–" : `${ms.toFixed(ms < 100 ? 1 : 0)} ms`;
}

export class ServerGauges {
  constructor() {
    this.last = null;
    this.rates = [];
  }

  // Takes an answer of /stats. Tokens are counted as the steps yield them: decode rows, and the first token of each prompt.
  show(stats, health) {
    const pages = stats.kv_pages_used + stats.kv_pages_free;
    element("resident").textContent = `${stats.active_requests} of ${health.max_batch}`;
    element("waiting").textContent = String(stats.queued_requests);
    element("pages").textContent = `${stats.kv_pages_used} of ${pages}`;
    setGauge("resident-gauge", stats.active_requests, health.max_batch);
    setGauge("pages-gauge", stats.kv_pages_used, pages);

    const now = performance.now();
    const count = stats.average_batch_size * stats.decode_steps + (stats.prefill_final_rows ?? 0);
    if (this.last && count >= this.last.count && now > this.last.now) {
      this.rates.push((1000 * (count - this.last.count)) / (now - this.last.now));
      if (this.rates.length > SAMPLES_KEPT) this.rates.shift();
      element("server-rate").textContent = rateText(this.rates.at(-1));
      this.draw();
    }
    this.last = { now, count };
  }

  // The server is away: no figure is better than an old one.
  clear() {
    this.last = null;
    for (const id of ["resident", "waiting", "pages", "server-rate"]) element(id).textContent = "–";
    for (const id of ["resident-gauge", "pages-gauge"]) setGauge(id, 0, 0);
  }

  draw() {
    const most = Math.max(1, ...this.rates);
    const x = (at) => 240 - 4 * (this.rates.length - 1 - at);
    const y = (rate) => 34 - (32 * rate) / most;
    const line = this.rates.map((rate, at) => `${x(at)},${y(rate).toFixed(1)}`).join("L");
    const path = `M${x(0)},36L${line}L240,36Z`;
    element("spark").firstElementChild.setAttribute("d", path);
  }
}

// The pace of one answer.
export class Pace {
  constructor() {
    this.asked = performance.now();
    this.first = null;
    this.last = null;
    this.tokens = 0;
    this.gaps = [];
  }

  token() {
    const now = performance.now();
    if (this.first === null) this.first = now;
    else this.gaps.push(now - this.last);
    this.last = now;
    this.tokens += 1;
  }

  get ttft() {
    return this.first === null ? null : this.first - this.asked;
  }

  get rate() {
    return this.tokens > 1 && this.last > this.first ? (1000 * (this.tokens - 1)) / (this.last - this.first) : null;
  }

  show() {
    const sorted = [...this.gaps].sort((a, b) => a - b);
    element("stream-rate").textContent = rateText(this.rate);
    element("ttft").textContent = timeText(this.ttft);
    element("gap").textContent = timeText(sorted[sorted.length >> 1] ?? null);
    element("worst-gap").textContent = timeText(sorted.at(-1) ?? null);
  }
}
