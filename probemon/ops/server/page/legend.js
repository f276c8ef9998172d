// What the marks in an answer mean, in a line under it: the branches that its colours stand for among them.

import { $, el } from "./elements.js";
import { colourOf, headsOf } from "./branches.js";
import { nameOf } from "./said.js";
import { count } from "./words.js";

const BRANCHES = 8;

export function drawLegend(app, view) {
  const box = $("key-branches");
  const shown = view !== null && view.digest.marks.size > 0;
  $("key").hidden = view === null || !view.choice.tokens.length;
  const heads = shown ? headsOf(view.pack, [...view.digest.marks.keys()]) : [];
  const key = `${view?.pack.pack} ${heads.join()}`;
  if (box.key !== key) {
    box.key = key;
    box.replaceChildren(
      ...heads
        .slice(0, BRANCHES)
        .map((c) =>
          el(
            "li",
            {},
            el("span", { class: `swatch ${c === null ? "h8 l0" : colourOf(view.pack, c)}`, "aria-hidden": "true" }),
            el("bdi", {}, c === null ? "broader than one branch" : nameOf(view.pack, c)),
          ),
        ),
      ...(heads.length > BRANCHES ? [el("li", { class: "dim" }, `and ${heads.length - BRANCHES} more`)] : []),
    );
  }
  drawHelp(app);
}

/** What the help says about the pack that the server has. */
function drawHelp({ state: { pack } }) {
  if (pack === null || $("help-pack").pack === pack) return;
  $("help-pack").pack = pack;
  const mute = pack.concepts.filter(({ threshold }) => threshold === null || threshold >= 1).length;
  const measured = pack.concepts.filter(({ precision }) => precision !== null && precision !== undefined).length;
  $("help-pack").textContent = [
    `It has ${count(pack.concepts.length)} concepts.`,
    measured ? `For ${count(measured)} it says how often they are right.` : "It does not say how often they are right.",
    mute ? `${count(mute)} of them can never fire: they have no usable threshold.` : "",
  ]
    .filter(Boolean)
    .join(" ");
}
