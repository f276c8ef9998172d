// What the tokens of an answer say of the concepts: which lead at each, where each began, how strong it was. Pure.

import { strengthOver } from "./strength.js";

/**
 * The digest of a choice up to its token `upto` (an index; by default all): {leaders, concepts, marks}.
 *
 * `leaders[i]`: of token i the concepts that fire, less those that stand above another that fires, the strongest
 * first: [{c, score, strength}].
 * `near[i]`: of token i the concepts told that do not fire, the nearest first.
 * `concepts`: by concept {c, first, n, nLead, peak, peakAt, at, strengths}: the first token at which it fired, at how
 * many it fired and led, its greatest strength, at which tokens it fired and how strongly.
 * `nears`: the same of the concepts told at tokens at which they do not fire.
 * `marks`: by leading concept its number, from 1 in the order in which they began: it does not change as the answer
 * grows.
 */
export function digest(choice, pack, upto = choice.tokens.length - 1) {
  const known = cache.get(choice);
  if (known && known.version === choice.version && known.upto === upto && known.pack === pack) return known.value;
  const leaders = [];
  const near = [];
  const concepts = new Map();
  const nears = new Map();
  const marks = new Map();
  const note = (map, c, i, strength) => {
    const found = map.get(c) ?? { c, first: i, n: 0, nLead: 0, peak: -Infinity, peakAt: i, at: [], strengths: [] };
    found.n++;
    found.at.push(i);
    found.strengths.push(strength);
    if (strength !== null && strength > found.peak) {
      found.peak = strength;
      found.peakAt = i;
    }
    map.set(c, found);
    return found;
  };
  choice.tokens.slice(0, upto + 1).forEach((token, i) => {
    const told = new Map(
      token.top.map(([c, score, strength]) => [c, { c, score, strength: strength ?? strengthIn(pack, c, score) }]),
    );
    const fired = new Set(token.fired);
    const above = new Set();
    for (const c of fired)
      pack
        .path(c)
        .slice(0, -1)
        .forEach((a) => above.add(a)); // by other parents: not shown with c
    const known = (c) => told.get(c) ?? { c, score: null, strength: strengthAt(token, c) };
    for (const c of fired) note(concepts, c, i, known(c).strength);
    const leading = [...fired]
      .filter((c) => !above.has(c))
      .map(known)
      .sort((a, b) => (b.strength ?? -Infinity) - (a.strength ?? -Infinity) || a.c - b.c);
    for (const { c } of leading) {
      concepts.get(c).nLead++;
      if (!marks.has(c)) marks.set(c, marks.size + 1);
    }
    leaders.push(leading);
    near.push([...told.values()].filter(({ c }) => !fired.has(c)));
    for (const { c, strength } of near[i]) note(nears, c, i, strength);
  });
  const value = { leaders, near, concepts, nears, marks };
  cache.set(choice, { version: choice.version, upto, pack, value });
  return value;
}

const cache = new WeakMap();

/** By how much a score is over its concept's threshold; null of a concept that has none. */
function strengthIn(pack, c, score) {
  const { threshold } = pack.concepts[c];
  return threshold === null ? null : strengthOver(threshold, score);
}

/** How strongly a concept fires at a token, whether or not its client asked for so many of the best; else null. */
export const strengthAt = (token, c) => token.strengths[token.fired.indexOf(c)] ?? null;

/** How strong in three steps, of which each looks different without colour, too. */
export const tint = (strength) => (strength === null ? 1 : strength < 0.5 ? 0 : strength < 2 ? 1 : 2);
export const STEPS = ["weak", "clear", "strong"];

/** Concepts that led somewhere, those that led at most tokens first. */
export function foremost({ concepts }) {
  return [...concepts.values()]
    .filter(({ nLead }) => nLead)
    .sort((a, b) => b.nLead - a.nLead || b.peak - a.peak || a.c - b.c);
}

/** The concepts of the rules that were met or could not be evaluated up to token `upto`, each once: [{c, events}]. */
export function ruled({ events, tokens }, pack, upto) {
  const last = tokens[upto]?.position ?? -1;
  const found = new Map();
  for (const event of events) {
    const c = pack.byId.get(event.concept);
    if (c !== undefined && event.position <= last) found.set(c, [...(found.get(c) ?? []), event]);
  }
  return [...found].map(([c, ofConcept]) => ({ c, events: ofConcept }));
}

/** At most `most` of the concepts that led, in the order in which they began. */
export function lanesOf(told, most) {
  return foremost(told)
    .slice(0, most)
    .sort((a, b) => told.marks.get(a.c) - told.marks.get(b.c));
}

/** Concepts that never fired, the nearest to their thresholds first, at most `most`. */
export function nearest({ concepts, nears }, most) {
  return [...nears.values()]
    .filter(({ c, peak }) => !concepts.has(c) && peak > -Infinity) // without a threshold nothing is near it
    .sort((a, b) => b.peak - a.peak || a.c - b.c)
    .slice(0, most);
}

/** Places in a text as JavaScript counts them, where a character beyond 0xFFFF is two. */
export function utf16Places(text) {
  if (!/[\ud800-\udbff]/.test(text)) return (at) => Math.min(at, text.length);
  const places = [];
  let at = 0;
  for (const character of text) {
    places.push(at);
    at += character.length;
  }
  places.push(at);
  return (i) => places[Math.min(i, places.length - 1)];
}

/** A pack as the server tells it, with who stands above whom and what a name means. */
export function readPack(told, pathsOf) {
  const path = pathsOf(told.concepts.map(({ parents }) => parents));
  const children = told.concepts.map(() => []);
  const roots = [];
  told.concepts.forEach(({ parents }, c) => (parents.length ? children[parents[0]] : roots).push(c));
  return { ...told, path, children, roots, byId: new Map(told.concepts.map(({ id }, c) => [id, c])) };
}
