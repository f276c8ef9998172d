// Letters under so many marks that they would be drawn over the lines above and below: they are cut off at their own.

import { el } from "./elements.js";
import { harmless } from "./harmless.js";

const STACKED = /\P{M}?\p{M}{5,}/gu; // no script has five marks on one letter

/** The stretches of a text with such letters: [{begin, end}]. */
export const stackedIn = (text) =>
  [...text.matchAll(STACKED)].map((found) => ({ begin: found.index, end: found.index + found[0].length }));

/** A text as children of an element, harmless and each such letter in a box of its own. */
export function contained(text) {
  const nodes = [];
  let at = 0;
  for (const { begin, end } of stackedIn(text)) {
    nodes.push(harmless(text.slice(at, begin), "\n\t"));
    nodes.push(el("span", { class: "stacked" }, harmless(text.slice(begin, end), "\n\t")));
    at = end;
  }
  return [...nodes, harmless(text.slice(at), "\n\t")].filter((node) => node !== "");
}
