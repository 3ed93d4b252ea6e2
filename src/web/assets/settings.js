// The settings form: its values, their bounds, and what of them goes into a request. Kept in this browser between visits.

const STORE = "crucible.settings";
const KEPT = ["temperature", "top-k", "top-p", "min-p", "seed", "max-tokens", "system", "shade"];

const element = (id) => document.getElementById(id);

export class Settings {
  constructor() {
    this.form = element("settings");
    this.temperature = element("temperature");
    this.slider = element("temperature-slider");
    this.load();
    this.follow();
    this.slider.addEventListener("input", () => {
      this.temperature.value = this.slider.value;
    });
    this.form.addEventListener("input", () => {
      this.follow();
      this.save();
    });
    this.form.addEventListener("submit", (event) => event.preventDefault());
  }

  // Whether every value is in bounds; otherwise the first that is not says why.
  valid() {
    return this.form.reportValidity();
  }

  get system() {
    return element("system").value.trim();
  }

  // The sampling fields of a request. Without a temperature the answer is greedy and the rest is left out.
  body() {
    const number = (id) => (element(id).value === "" ? undefined : Number(element(id).value));
    const body = { max_tokens: number("max-tokens") };
    const temperature = number("temperature");
    if (temperature > 0) {
      Object.assign(body, {
        temperature,
        top_k: number("top-k"),
        top_p: number("top-p"),
        min_p: number("min-p"),
        seed: number("seed"),
      });
    }
    return body;
  }

  // What depends on a value follows it.
  follow() {
    const temperature = Number(this.temperature.value);
    const draws = temperature > 0;
    element("filters").disabled = !draws;
    element("temperature-hint").textContent = draws
      ? "Drawn at random by the seed: the same seed draws the same."
      : "Greedy: always the likeliest token.";
    this.slider.value = String(temperature);
    document.documentElement.classList.toggle("shaded", element("shade").checked);
  }

  load() {
    let kept = {};
    try {
      kept = JSON.parse(localStorage.getItem(STORE)) ?? {};
    } catch {
      // Storage is off or holds something else: the defaults stay.
    }
    for (const id of KEPT) {
      const input = element(id);
      if (typeof kept[id] === "boolean") input.checked = kept[id];
      if (typeof kept[id] === "string") input.value = kept[id];
    }
  }

  save() {
    const values = KEPT.map((id) => [id, id === "shade" ? element(id).checked : element(id).value]);
    try {
      localStorage.setItem(STORE, JSON.stringify(Object.fromEntries(values)));
    } catch {
      // Storage is off: the values last as long as the page.
    }
  }
}
