// Words for what tokens show, the same in tips, panels and for screen readers.

import { plural, score } from "./words.js";
import { STEPS, tint } from "./digest.js";
import { clip } from "./harmless.js";
import { isReasoning } from "./state.js";

const LINES = 5;

export const nameOf = (pack, c) => clip(pack.concepts[c].name, 80);
export const idOf = (pack, c) => clip(pack.concepts[c].id, 80);
export const above = (pack, c) =>
  pack
    .path(c)
    .slice(0, -1)
    .map((a) => nameOf(pack, a))
    .join(" › ");
export const quoted = (token) => `“${clip(token.text.trim() || token.text, 40)}”`;
/** A token of an answer with its number, counted from 1. */
export const numbered = ({ tokens }, i) => `${quoted(tokens[i])} ${i + 1}`;
/** A strength as people read it: how far over the threshold, or below it. */
export const strengthInWords = (x) =>
  x < 0 ? `${Math.abs(x).toFixed(1)} below its threshold` : `${STEPS[tint(x)]}, ${x.toFixed(1)}`;

/** The same of a concept without a threshold: its score. */
export function strengthOf(pack, c, strength, value = null) {
  if (strength === null) return "fires";
  return pack.concepts[c].threshold === null ? `score ${score(value ?? strength)}` : strengthInWords(strength);
}

/** How often a concept is right when it fires; "" if its pack does not say. */
export const right = (pack, c) => {
  const { precision } = pack.concepts[c];
  return precision === null || precision === undefined ? "" : `right ${Math.round(100 * precision)} times in 100`;
};

/** One line on a concept at a token: "whale: strong, 2.3 (score 0.912, fires over 0.513), right 90 times in 100". */
export function inOneLine(pack, { c, score: value, strength }) {
  const { threshold } = pack.concepts[c];
  const over = threshold === null ? "" : `, fires over ${score(threshold)}`;
  const numbers = value === null ? "" : ` (score ${score(value)}${over})`;
  return [`${nameOf(pack, c)}: ${strengthOf(pack, c, strength, value)}${numbers}`, right(pack, c)]
    .filter(Boolean)
    .join(", ");
}

/** The name of the concept that an event is of. */
export const ruleOf = ({ name, concept }) => clip(name ?? concept, 60);

const why = ({ blind }) => clip(blind, 200);

/** What an event says after its name; one with `blind` is of a token without a score, of which nobody knows. */
export function cameOf(event) {
  const stopped = event.action === "stop";
  if (event.blind) return `could not be evaluated${stopped ? ", which stopped the answer" : ""}: ${why(event)}`;
  return stopped ? "stopped the answer" : "was met";
}

/** How an answer ended that an event stopped; `kind`: words before the name. */
export const stoppedBy = (event, kind = "") =>
  event.blind
    ? `stopped: ${ruleOf(event)} could not be evaluated: ${why(event)}`
    : `stopped by ${kind}${ruleOf(event)}`;

/** Lines on a token: what it is, what leads there or why nothing is known of it. */
export function linesOf(view, i) {
  const token = view.choice.tokens[i];
  const { leaders, near } = view.digest;
  const head = `${quoted(token)} ${isReasoning(token) ? "reasoning " : ""}token ${i + 1}`;
  if (token.unseen) return [head, `not checked: ${clip(token.unseen, 200)}`];
  const found = leaders[i] ?? [];
  const more = found.length > LINES ? [`and ${plural(found.length - LINES, "more concept")}`] : [];
  if (found.length) return [head, ...found.slice(0, LINES).map((at) => inOneLine(view.pack, at)), ...more];
  return [
    head,
    `no ${toldOf(view) ? "requested " : ""}concept fires here`,
    ...(near[i] ?? []).slice(0, 1).map((at) => `closest: ${inOneLine(view.pack, at)}`),
  ];
}

/** Which concepts alone an answer's client asked to be told of; nothing where it is all of them. */
export function toldOf({ run }) {
  const named = run.options?.probemon?.concepts;
  return Array.isArray(named)
    ? `the client asked only for ${named.map((name) => clip(String(name), 40)).join(", ") || "no concept"}`
    : "";
}
