// Parts of several panels: a concept's colour, its bar, the buttons that lead to it and to a token.

import { el } from "./elements.js";
import { colourOf } from "./branches.js";
import { nameOf, numbered } from "./said.js";

/** A sample of a concept's colour and line. */
export const swatch = (pack, c) => el("span", { class: `swatch ${colourOf(pack, c)}`, "aria-hidden": "true" });

export function bar(share, kind = "bar") {
  const inner = el("i");
  const node = el("span", { class: kind, "aria-hidden": "true" }, inner);
  inner.style.width = share > 0 ? `${Math.max(4, Math.min(100, 100 * share))}%` : "0";
  return node;
}

/** A button with a concept's name, which opens its card. */
export const nameButton = (app, view, c, title) =>
  el(
    "button",
    {
      class: "concept",
      type: "button",
      "data-stop": `concept ${c}`,
      "aria-pressed": String(view.concept === c),
      title,
      click: () => app.choose(c),
    },
    swatch(view.pack, c),
    el("bdi", {}, nameOf(view.pack, c)),
  );

/** A link to a token of the answer. */
export const tokenButton = (app, view, i, stop, before = "") =>
  el(
    "button",
    { class: "since", type: "button", "data-stop": stop, click: () => app.pin(i) },
    `${before}${numbered(view.choice, i)}`,
  );
