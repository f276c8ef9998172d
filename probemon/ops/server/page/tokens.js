// The tokens of an answer in its text: named, coloured and underlined by the concept that leads at each, hatched where
// nothing is known.

import { el } from "./elements.js";
import { segments } from "./segments.js";
import { strengthAt, tint, utf16Places } from "./digest.js";
import { colourOf } from "./branches.js";
import { clip, harmless } from "./harmless.js";
import { fitLabels } from "./labels.js";
import { nameOf, ruleOf, stoppedBy } from "./said.js";
import { stackedIn } from "./stacked.js";
import { isReasoning } from "./state.js";

const NAME = 40; // characters of a name over a token
const BLANK = /\n(?:[^\S\n]*\n)+/g;
const OPENED = /^(?:[^\S\n]*\n)+|\n(?:[^\S\n]*\n)+/g; // after the end of a line

/**
 * Pieces of a text: {text, at}, `at` the indices of the tokens that stand in it; then the tokens that add no text,
 * like that of the end.
 */
function piecesIn(whole, tokens, indices) {
  const place = utf16Places(whole);
  const inText = [];
  const own = [];
  for (const i of indices) {
    const { start, end } = tokens[i];
    if (start === null || (start === end && place(end) >= whole.length)) own.push(i);
    else inText.push({ start: place(start), end: place(end), i });
  }
  const pieces = whole
    ? segments(whole, inText).map(([text, found]) => ({ text, at: found.map(({ i }) => i), own: false }))
    : [];
  const stacked = stackedIn(whole);
  if (stacked.length) {
    let begin = 0;
    for (const piece of pieces) {
      const end = begin + piece.text.length;
      piece.stacked = stacked.some((run) => run.begin < end && run.end > begin);
      begin = end;
    }
  }
  const alone = (i) => ({ text: tokens[i].text, at: [i], own: true, stacked: stackedIn(tokens[i].text).length > 0 });
  return [...pieces, ...own.map(alone)];
}

/** Pieces of an answer. Those of reasoning, and its marks, come first; then each part begins with a label. */
function piecesOf({ text, reasoning, tokens }) {
  const thoughts = tokens.map(isReasoning);
  const all = [...tokens.keys()];
  if (!reasoning && !thoughts.includes(true)) return piecesIn(text, tokens, all);
  const isMark = (i) =>
    !thoughts[i] && tokens[i].start === tokens[i].end && (thoughts[i - 1] || thoughts[i + 1]) === true;
  const first = thoughts.indexOf(true);
  const marks = all.filter(isMark).map((i) => ({ text: tokens[i].text, at: [i], own: true }));
  const thought = [
    ...marks.filter(({ at }) => at[0] < first),
    ...piecesIn(
      reasoning,
      tokens,
      all.filter((i) => thoughts[i]),
    ),
    ...marks.filter(({ at }) => at[0] > first),
  ].map((piece) => ({ ...piece, thought: true }));
  const reply = piecesIn(
    text,
    tokens,
    all.filter((i) => !thoughts[i] && !isMark(i)),
  );
  const label = (words) => ({ text: words, at: [], label: true });
  return [label("Reasoning"), ...thought, ...(reply.length ? [label("Reply"), ...reply] : [])];
}

/**
 * What leads at a piece: the chosen concept alone where there is one; that of a rule that was met there; of several
 * tokens in one piece the strongest.
 */
function leaderOf({ digest, choice, concept, pack }, at, event) {
  const found = [];
  const ruled = event && pack.byId.get(event.concept);
  if (concept === null && ruled !== undefined && ruled !== null) {
    const token = choice.tokens.find(({ position }) => position === event.position);
    return { c: ruled, strength: strengthAt(token, ruled) };
  }
  for (const i of at) {
    if (concept === null) found.push(...(digest.leaders[i] ?? []).slice(0, 1));
    else if (choice.tokens[i].fired.includes(concept)) {
      const told = choice.tokens[i].top.find(([c]) => c === concept);
      found.push({ c: concept, score: told?.[1] ?? null, strength: strengthAt(choice.tokens[i], concept) });
    }
  }
  return found.sort((a, b) => (b.strength ?? 0) - (a.strength ?? 0))[0] ?? null;
}

function look(view, piece, previous) {
  const { choice, pack, upto } = view;
  const tokens = piece.at.map((i) => choice.tokens[i]);
  const kinds = ["tok"];
  const later = piece.at.length > 0 && piece.at[0] > upto;
  const events = later
    ? []
    : choice.events.filter(({ position }) => tokens.some((token) => token.position === position));
  const stop = events.find(({ action }) => action === "stop") ?? null;
  const event = stop ?? events[0] ?? null;
  const leader = later ? null : leaderOf(view, piece.at, event);
  if (piece.own) kinds.push("own");
  if (piece.thought) kinds.push("thought");
  if (piece.stacked) kinds.push("stacked");
  if (later) kinds.push("later");
  if (tokens.length && tokens.every(({ unseen }) => unseen)) kinds.push("unseen");
  if (piece.at.includes(view.pinned)) kinds.push("pinned");
  let mark = "";
  if (leader) {
    kinds.push(colourOf(pack, leader.c), `t${tint(leader.strength)}`);
    if (previous !== leader.c) mark = clip(pack.concepts[leader.c].name, NAME);
  }
  if (event) {
    kinds.push(stop ? "stops" : "recorded");
    mark = `${stop ? "■" : "▲"} ${clip(ruleOf(event), NAME)}`;
  }
  return { kind: kinds.join(" "), mark, stop, leader: leader?.c ?? null };
}

/** What a drawn piece is known by. */
const keyOf = ({ text, at, own, label, stacked, opens }) => `${own}${label}${stacked}${opens}${at}|${text}`;

/** A text with its blank lines, each as high as a line with names, made narrow. `opens`: it follows a line's end. */
function withGaps(text, opens) {
  const nodes = [];
  let done = 0;
  for (const { 0: blank, index } of text.matchAll(opens ? OPENED : BLANK)) {
    if (index > done) nodes.push(text.slice(done, index));
    nodes.push(el("span", { class: "gap" }, blank));
    done = index + blank.length;
  }
  return [...nodes, text.slice(done)];
}

function build(piece) {
  const { text, at, own, label } = piece;
  if (label) return { node: el("span", { class: "label" }, text), mark: null, key: keyOf(piece) };
  // The space before a word is of its token, but a mark looks like a word's when it begins where that does.
  const lead = text.length - text.trimStart().length;
  const blank = own || lead === text.length ? 0 : lead;
  const shown = own ? [clip(text || "·", 40)] : withGaps(harmless(text.slice(blank), "\n\t"), piece.opens && !blank);
  const mark = el("span", at.length ? { tabindex: "-1" } : {}, ...shown);
  const node = el("span", {}, ...withGaps(text.slice(0, blank), piece.opens), mark);
  mark.at = at;
  return { node, mark, key: keyOf(piece) };
}

/**
 * Draw the tokens of a view into a box; what is drawn already stays. `view`: {choice, digest, pack, upto, pinned,
 * concept}, where `pinned` is the index of a token or null and `concept` a number or null.
 */
export function drawTokens(box, view) {
  const drawn = box.drawn ?? [];
  const { choice, upto, pinned, concept } = view;
  const key = [choice.version, choice.tokens.length, upto, pinned, concept].join();
  if (drawn.length && box.drawnKey === key) {
    fitLabels(box);
    return;
  }
  box.drawnKey = key;
  const pieces = piecesOf(view.choice);
  let previous = null;
  pieces.forEach((piece, k) => {
    piece.opens = k > 0 && /\n[^\S\n]*$/.test(pieces[k - 1].text);
    if (drawn[k]?.key !== keyOf(piece)) {
      const made = build(piece);
      if (drawn[k]) drawn[k].node.replaceWith(made.node);
      else box.append(made.node);
      drawn[k] = made;
    }
    if (piece.label) return;
    const { kind, mark, stop, leader } = look(view, piece, previous);
    const entry = drawn[k];
    if (/\S/.test(piece.text)) previous = leader;
    const plain = piece.at.length ? kind : piece.thought ? "tok plain thought" : "tok plain";
    if (entry.mark.className !== plain) entry.mark.className = plain;
    if ((entry.mark.dataset.mark ?? "") !== mark) {
      if (mark) entry.mark.dataset.mark = mark;
      else delete entry.mark.dataset.mark;
      box.unfitted = true;
    }
    drawStop(entry, stop, view.pack);
  });
  for (const { node } of drawn.splice(pieces.length)) node.remove();
  box.drawn = drawn;
  fitLabels(box);
  if (!box.querySelector('.tok[tabindex="0"]')) box.querySelector('.tok[tabindex="-1"]')?.setAttribute("tabindex", "0");
}

function drawStop(entry, stop, pack) {
  const words = stop === null ? "" : stoppedBy(stop);
  if ((entry.stop?.textContent ?? "") === words) return;
  entry.stop?.remove();
  entry.stop = words
    ? el(
        "span",
        {
          class: "halt",
          title: stop && pack.byId.has(stop.concept) ? nameOf(pack, pack.byId.get(stop.concept)) : undefined,
        },
        words,
      )
    : null;
  if (entry.stop) entry.node.append(entry.stop);
}

/** Let pointer and keys walk over the tokens of a box. `on.hover(i or null)`, `on.pin(i or null)`, `on.say(i)`. */
export function walkTokens(box, on) {
  const tokenAt = (event) => {
    const node = event.target.closest(".tok");
    return node?.at?.length ? node : null;
  };
  box.addEventListener("pointermove", (event) => on.hover(tokenAt(event)?.at[0] ?? null));
  box.addEventListener("pointerleave", () => on.hover(null));
  box.addEventListener("click", (event) => {
    const node = tokenAt(event);
    if (node && !getSelection().toString()) on.pin(node.at[0]);
  });
  box.addEventListener("focusin", (event) => {
    const node = tokenAt(event);
    if (node) {
      on.hover(node.at[0]);
      on.say(node.at[0]);
    }
  });
  box.addEventListener("focusout", () => on.hover(null));
  box.addEventListener("keydown", (event) => {
    const node = tokenAt(event);
    if (!node) return;
    const all = [...box.querySelectorAll(".tok[tabindex]")];
    const i = all.indexOf(node);
    const marked = (from, step) => {
      let k = from + step;
      while (all[k] && !all[k].dataset.mark && !all[k].classList.contains("unseen")) k += step;
      return all[k];
    };
    const to = {
      ArrowRight: all[i + 1],
      ArrowLeft: all[i - 1],
      ArrowDown: marked(i, 1),
      ArrowUp: marked(i, -1),
      Home: all[0],
      End: all.at(-1),
    }[event.key];
    if (event.key === "Enter") on.pin(node.at[0]);
    else if (event.key === "Escape") on.pin(null);
    else if (to) {
      node.tabIndex = -1;
      to.tabIndex = 0;
      to.focus();
    } else if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
  });
}
