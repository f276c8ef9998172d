// The page of a report. All it shows lies in JSON blocks of the same file, and reaches the page as text nodes and checked attributes,
// never as markup: ids, names and texts are whatever somebody wrote. The place (view, concept, document, ...) is kept in the address's hash.
// What it imports, the page of `probemon serve` imports, too. report.py puts those files before this one, into one script.

import { $, el } from "./elements.js";
import { pathsOf } from "./hierarchy.js";
import { segments } from "./segments.js";
import { BREAKS, step, strengthOver } from "./strength.js";
import { tips } from "./tip.js";
import { count, percent, plural, score } from "./words.js";

const data = JSON.parse(document.getElementById("data").textContent);
const { concepts, documents, pairs, heat, totals, made } = data;
const nConcepts = concepts.id.length, nDocuments = documents.id.length;
const seen = documents.tokens.map((n, d) => n - documents.unseen[d]);
const allSeen = totals.tokens - totals.unseen;
const byId = new Map(concepts.id.map((id, c) => [id, c]));
const embedded = new Set(documents.texts), excluded = new Set(concepts.excluded);
const isMute = (c) => data.floor === "fired" && !(concepts.threshold[c] !== null && concepts.threshold[c] < 1);
const mute = concepts.threshold.map((_, c) => c).filter((c) => isMute(c) && !excluded.has(c));
/** That some of a document's tokens were not seen, or none was; "" where all were. */
const unseenOf = (d) => !documents.unseen[d] ? "" : !seen[d] ? "no token seen" : `${count(documents.unseen[d])} unseen`;
const VIEWS = ["overview", "hierarchy", "concepts", "documents"];
const PAGE = 50, MARKED = 12, LEAD = 24;

// -- words and numbers ---------------------------------------------------------------------------

const mean = (c) => allSeen ? concepts.sum[c] / allSeen : 0;

const path = pathsOf(concepts.parents);
const inWords = (line) => line.map((c) => concepts.name[c]).join(" › ");
const above = (c) => inWords(path(c).slice(0, -1));
const named = (c) => el("span", { class: "name" }, concepts.name[c]);
const idOf = (d) => documents.id[d].trim() ? documents.id[d] : `${documents.id[d]}(document ${d})`;

const dim = (tag, text) => el(tag, { class: "dim" }, text);
const td = (...children) => el("td", {}, ...children);
const right = (label, text) => el("td", { class: "number", "data-label": label }, text);
const button = (text, act, more = {}) => el("button", { class: "plain", type: "button", click: act, ...more }, text);
const table = (kind, rows, head) => el("table", { class: kind }, head && el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows.map((cells) => el("tr", {}, cells))));

/** A table of the first n of some items, with a button for more of them. */
function growing(items, n, row, head) {
  const node = table("plain", items.slice(0, n).map(row), head), left = items.length - n;
  const grow = () => node.replaceWith(growing(items, n + 500, row, head));
  if (left > 0) node.append(el("tfoot", {}, el("tr", {}, el("td", { colspan: 9 }, button(`${count(left)} more`, grow)))));
  return node;
}

/** What lists are ordered by. */
const strength = (c, x) => strengthOver(concepts.threshold[c], x);
const over = (c, x) => concepts.threshold[c] === null ? score(x) : `${score(x)} (threshold ${score(concepts.threshold[c])})`;

// -- seven shades of one hue, with breaks that are the same in every report -----------------------

const SCALES = {
  share: { name: "share of tokens", breaks: [0.002, 0.005, 0.01, 0.02, 0.05, 0.1], show: percent },
  highest: { name: "highest score", breaks: [0.15, 0.3, 0.45, 0.6, 0.75, 0.9], show: (x) => x.toFixed(2) },
  mean: { name: "mean score", breaks: [0.002, 0.005, 0.01, 0.02, 0.05, 0.1], show: (x) => String(x) },
  strength: { name: "strength over the threshold", breaks: BREAKS.strength, show: String },
  score: { name: "score", breaks: BREAKS.score, show: (x) => x.toFixed(2) },
  count: { name: "number of concepts over the floor", breaks: [1, 2, 4, 8, 16, 32], show: String },
};
const shade = (scale, value) => step(SCALES[scale].breaks, value);

function legend(node, scale) {
  const { name, breaks, show } = SCALES[scale];
  const marks = [`to ${show(breaks[0])}`, ...breaks.slice(1).map(show), `over ${show(breaks[5])}`];
  node.replaceChildren(el("span", {}, `${name}: `), ...marks.map((text, i) => el("i", { class: `s${i + 1}` }, text)));
}

function choices(select, scales, chosen) {
  select.replaceChildren(...scales.map((scale) => el("option", { value: scale }, SCALES[scale].name)));
  select.value = chosen;
  select.addEventListener("change", render);
}

// -- the place: what of the address's hash is known is taken, the rest is ignored -----------------

let place = {};

function readPlace() {
  const given = new URLSearchParams(location.hash.slice(1));
  const whole = (name, n) => /^\d{1,9}$/.test(given.get(name) ?? "") && Number(given.get(name)) < n ? Number(given.get(name)) : null;
  const concept = (name) => byId.get(given.get(name)) ?? null;
  const found = {
    view: given.get("view"), concept: concept("concept"), root: concept("root"), doc: whole("doc", nDocuments), bin: whole("bin", heat.seen.length),
    part: whole("part", 1e9) ?? 0, page: whole("page", 1e9) ?? 0, sort: given.get("sort"), q: given.get("q") ?? "",
  };
  if (!VIEWS.includes(found.view)) found.view = found.doc !== null || found.concept !== null || found.bin !== null ? "documents" : found.root !== null ? "hierarchy" : "overview";
  return found;
}

function hashOf(where) {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(where)) {
    if (value === null || value === undefined || value === "" || ((name === "part" || name === "page") && value === 0)) continue;
    given.set(name, name === "concept" || name === "root" ? concepts.id[value] : value);
  }
  return `#${given}`;
}

const link = (where, ...children) => el("a", { href: hashOf(where) }, ...children);
function go(where, replace = false) {
  if (!replace) location.hash = hashOf(where);
  else { history.replaceState(null, "", hashOf(where)); render(); }
}

// -- the tip under the pointer or the focus ------------------------------------------------------

const tip = $("tip");

function pager(node, n, size, page, to) {
  const pages = Math.max(1, Math.ceil(n / size));
  const turn = (text, target) => button(text, () => to(target), { disabled: target < 0 || target >= pages ? "" : undefined });
  node.replaceChildren(...(pages === 1 ? [] : [turn("Previous", page - 1), el("span", {}, `${count(page + 1)} of ${count(pages)}`), turn("Next", page + 1)]));
}

/** The page of a list that the place asks for, or its last. */
const pageOf = (found) => Math.min(place.page, Math.max(0, Math.ceil(found.length / PAGE) - 1));

/** Headings, those with a key sorting by it. */
function sortable(row, columns, current) {
  const focused = row.contains(document.activeElement);
  row.replaceChildren(...columns.map(([key, label, kind]) => {
    const rises = key === "order" || key === "name", to = () => go({ ...place, sort: key, page: 0 });
    const sorted = key !== current ? undefined : rises ? "ascending" : "descending";
    const text = sorted ? `${label} ${rises ? "▴" : "▾"}` : label;
    return el("th", { class: kind, scope: "col", "aria-sort": sorted }, key ? el("button", { type: "button", click: to }, text) : label);
  }));
  if (focused) row.querySelector("[aria-sort] button")?.focus();
}

// -- overview ------------------------------------------------------------------------------------

const aToken = (n) => `${allSeen ? (n / allSeen).toFixed(1) : 0} a token`;

function drawOverview() {
  const figure = (n, what, more) => el("div", {}, el("b", {}, count(n)), what, el("small", {}, more));
  $("figures").replaceChildren(
    figure(totals.documents, "documents", totals.bad_documents ? `${count(totals.bad_documents)} of them could not be scored` : "all of them scored"),
    figure(totals.tokens, "tokens", totals.unseen ? `${count(totals.unseen)} of them unseen: their hidden state or a score was not a number` : "all of them seen"),
    figure(concepts.documents.filter((n) => n).length, "concepts over the floor", `of ${count(nConcepts)} in the pack${mute.length ? `, ${count(mute.length)} of them cannot be: alert threshold 1 or not set` : ""}${excluded.size ? `, ${count(excluded.size)} of them excluded: nothing is known about these` : ""}`),
    figure(totals.rows, "scores over the floor", aToken(totals.rows)));
  $("caution").textContent = [
    data.floor === "fired" ? "The floor is each concept's own alert threshold." : `The floor is a score of ${data.floor}, the same for every concept, whatever its alert threshold.`,
    data.floor === "fired"
      ? `A score over it is a hint, not a finding: false alarms are expected at the rate that the card of the pack ${data.pack} states for its thresholds.`
      : `A score over it is a hint, not a finding: false alarms are expected. The card of the pack ${data.pack} says how many, for its own thresholds only. A concept's precision is shown only if the floor is not below its threshold.`,
    "A concept may be present even if no score is over the floor.",
  ].join(" ");
  $("unlike").textContent = data.unlike;
  $("unlike").hidden = !data.unlike;
  drawCoverage();
  const best = [...concepts.id.keys()].filter((c) => concepts.documents[c]);
  const most = (c) => strength(c, concepts.highest[c]);
  best.sort((a, b) => concepts.documents[b] - concepts.documents[a] || concepts.tokens[b] - concepts.tokens[a] || most(b) - most(a) || a - b);
  // Of those that lead, what stands on the path of another says nothing more: the lowest on each path are listed.
  const inLead = best.slice(0, LEAD), covered = new Set(inLead.flatMap((c) => path(c).slice(0, -1)));
  const strongest = (c) => concepts.threshold[c] === null ? score(concepts.highest[c]) : `strength ${strength(c, concepts.highest[c]).toFixed(1)}`;
  const leading = (c) => [td(link({ concept: c }, named(c)), el("span", { class: "path" }, above(c))),
    right("", plural(concepts.documents[c], "document")), right("", plural(concepts.tokens[c], "token")),
    right("", strongest(c)), right("", concepts.precision[c] === null ? "" : `${percent(concepts.precision[c])} right`)];
  $("leading").replaceChildren(best.length ? table("", inLead.filter((c) => !covered.has(c)).slice(0, 8).map(leading)) : dim("p", "No concept was over the floor in any document."));
  const bad = Object.keys(documents.reasons).map(Number), reason = (d) => [td(link({ doc: d }, el("bdi", {}, idOf(d)))), td(el("bdi", {}, documents.reasons[d]))];
  $("bad").replaceChildren(...(bad.length ? [el("h2", {}, `${plural(bad.length, "document")} that could not be scored`), dim("p", "Nothing is known about their contents."), growing(bad, 20, reason)] : []));
  if ($("settings").children.length === 1) $("settings").append(table("plain", data.settings.map(([name, value]) => [dim("td", name), td(el("bdi", {}, value))])));
}

function drawCoverage() {
  const parts = [
    ["active", "s5", "active: scored by the cascade and kept in view"], ["dropped", "dropped", "dropped: a limit kept them out"],
    ["not_reached", "unreached", "not reached: the descent ended above them"],
    ...(totals.excluded ? [["excluded", "excluded", "excluded: left out by the settings"]] : []),
  ];
  const counts = { ...totals, not_reached: totals.not_reached - totals.excluded }; // which they count as, too
  const all = totals.active + totals.dropped + totals.not_reached || 1;
  const bars = parts.map(([name, kind]) => {
    const bar = el("span", { class: kind });
    bar.style.width = `${100 * counts[name] / all}%`;
    return bar;
  });
  const rows = parts.map(([name, kind, text]) => [td(el("span", { class: `key ${kind}` }), text), right("", aToken(counts[name]))]);
  $("coverage").replaceChildren(
    el("div", { class: "stack", role: "img", "aria-label": `active, dropped${totals.excluded ? ", not reached and excluded" : " and not reached"}` }, bars),
    table("plain", [...rows, [td("evaluated: probes whose score was computed"), right("", aToken(totals.evaluated))]]),
    dim("p", `Mean over ${plural(allSeen, "token")} seen, of ${count(nConcepts)} probes.`),
    data.audit && el("p", {}, `Audit (all probes at a sample of tokens): ${data.audit}.`));
}

// -- hierarchy: an icicle, each concept placed once, under its first parent -----------------------

const weight = [...concepts.tokens], below = concepts.id.map(() => []), roots = [];
for (const c of [...concepts.id.keys()].reverse()) {
  if (!weight[c]) continue; // parents have lower numbers than their children, so all below it has been added
  const parent = concepts.parents[c][0];
  if (parent !== undefined) weight[parent] += weight[c];
  (parent === undefined ? roots : below[parent]).push(c);
}
for (const list of [roots, ...below]) list.sort((a, b) => weight[b] - weight[a] || a - b);
const ROW = 32, LEAST = 4, LABELLED = 30;
const VALUES = { share: (c) => allSeen ? concepts.tokens[c] / allSeen : 0, mean, highest: (c) => concepts.highest[c] };

/** Cells {c, rest, depth, left, width} in parts of the whole; children too narrow to be seen are one cell with `rest` of them. */
function layOut(root, pixels) {
  const total = root === null ? roots.reduce((sum, c) => sum + weight[c], 0) : weight[root], cells = [];
  const lay = (c, list, depth, left) => {
    let at = left;
    list.forEach((child, i) => {
      const width = weight[child] / total;
      if (width * pixels < LEAST) { // the list is sorted: all that follow are narrow too
        if (i === list.findIndex((other) => weight[other] / total * pixels < LEAST)) {
          const others = list.slice(i);
          cells.push({ c, rest: others, depth, left: at, width: others.reduce((sum, other) => sum + weight[other], 0) / total });
        }
        return;
      }
      cells.push({ c: child, rest: null, depth, left: at, width });
      lay(child, below[child], depth + 1, at);
      at += width;
    });
  };
  if (total) { cells.push({ c: root, rest: null, depth: 0, left: 0, width: 1 }); lay(root, root === null ? roots : below[root], 1, 0); }
  return cells;
}

function drawHierarchy() {
  const box = $("icicle"), root = place.root, scale = $("shade").value, width = box.clientWidth || 1000, cells = layOut(root, width);
  const focused = box.contains(document.activeElement), nameOf = (c) => c === null ? "All concepts" : concepts.name[c];
  const nodes = cells.map((cell) => {
    const { c, rest } = cell, narrow = cell.width * width < LABELLED;
    const kind = rest ? "rest" : c === null || !concepts.tokens[c] ? "s0" : `s${shade(scale, VALUES[scale](c))}`;
    const label = rest ? plural(rest.length, "narrower concept") : nameOf(c);
    const node = el("button", { type: "button", class: `${kind}${narrow ? " narrow" : ""}`, tabindex: cell.depth ? "-1" : "0", "aria-label": label }, narrow ? "" : rest ? "…" : label);
    node.cell = cell;
    node.style.left = `${100 * cell.left}%`;
    node.style.width = `${100 * cell.width}%`;
    node.style.top = `${ROW * cell.depth}px`;
    return node;
  });
  box.replaceChildren(...nodes);
  box.style.height = `${ROW * (1 + Math.max(0, ...cells.map((cell) => cell.depth)))}px`;
  if (focused && nodes.length) nodes[0].focus();
  legend($("shade-legend"), scale);
  const line = [null, ...(root === null ? [] : path(root))], crumb = (c) => el("bdi", {}, nameOf(c));
  $("crumbs").replaceChildren(...line.map((c) => c === root ? el("b", {}, crumb(c)) : link({ view: "hierarchy", root: c }, crumb(c))));
  const idle = weight.filter((n, c) => !n && !excluded.has(c)).length;
  $("undrawn").textContent = !cells.length ? "No concept was over the floor, so there is nothing to draw."
    : (idle ? `${plural(idle, "concept")} not drawn: neither they nor anything below them was over the floor.` : "") +
      (excluded.size ? ` ${count(excluded.size)} more are excluded: nothing is known about them.` : "");
  drawNode(root, root === null ? roots : below[root]);
}

/** What is known of the concept on top, and the cells of the row below it in words, since some are too narrow for any. */
function drawNode(root, children) {
  const head = ["concept", "with all below", "tokens", "documents", "highest"].map((name, i) => el("th", { class: i ? "number" : "", scope: "col" }, name));
  const row = (c) => [td(link({ view: "hierarchy", root: c }, named(c))),
    ...[count(weight[c]), count(concepts.tokens[c]), count(concepts.documents[c]), highestOf(c)].map((text) => right("", text))];
  const about = root === null ? [] : [el("h2", {}, named(root)), ...facts(root).slice(1).map((text) => el("p", {}, text)), el("p", {}, link({ concept: root }, "Its documents, best first"))];
  $("node").replaceChildren(...about, ...(children.length ? [el("h2", {}, root === null ? "At the top" : "Below it"), growing(children, 40, row, head)] : []));
}

const highestOf = (c) => concepts.documents[c] ? score(concepts.highest[c]) : "–";

/** In a corpus of chats: how many of a concept's tokens each part said, ": 10 assistant, 2 reasoning". */
function byPart(c) {
  const counts = (concepts.parts[c] ?? []).map((n, i) => [n, data.parts[i]]).filter(([n]) => n);
  return counts.length ? `: ${counts.map(([n, part]) => `${count(n)} ${part}`).join(", ")}` : "";
}

/** Lines on a concept: where it stands, how often it was over the floor, how strongly. */
function facts(c) {
  const others = concepts.parents[c].slice(1);
  return [
    inWords(path(c)),
    `${concepts.id[c]}, level ${concepts.level[c]}`,
    excluded.has(c) ? "excluded: nothing is known about it" : isMute(c) ? `never over the floor, whatever it scores: its alert threshold is ${concepts.threshold[c] === null ? "not set" : 1}` : `over the floor in ${plural(concepts.documents[c], "document")}, at ${plural(concepts.tokens[c], "token")} (${percent(VALUES.share(c))})${byPart(c)}`,
    `${concepts.documents[c] ? `highest ${over(c, concepts.highest[c])}, ` : ""}mean over all tokens ${mean(c).toFixed(4)}`,
    `${plural(weight[c], "token")} with all placed below it, added up`,
    ...(others.length ? [`placed under its first parent; also below ${others.map((a) => concepts.name[a]).join(", ")}`] : []),
  ];
}

function zoom({ c, rest, depth }) {
  // The top bar goes up; a bundle of narrow cells opens their parent.
  const up = c === null ? null : concepts.parents[c][0] ?? null;
  go({ view: "hierarchy", root: depth === 0 && !rest ? up : c });
}

function moveInIcicle(event) {
  const from = event.target.cell;
  if (!from) return;
  const all = [...$("icicle").children];
  const inRow = (depth) => all.filter((node) => node.cell.depth === depth).sort((a, b) => a.cell.left - b.cell.left);
  const row = inRow(from.depth), i = row.indexOf(event.target), inside = (node, around) => node.left >= around.left - 1e-9 && node.left < around.left + around.width;
  let to;
  if (event.key === "ArrowRight") to = row[i + 1];
  else if (event.key === "ArrowLeft") to = row[i - 1];
  else if (event.key === "ArrowDown") to = inRow(from.depth + 1).find((node) => inside(node.cell, from));
  else if (event.key === "ArrowUp") to = inRow(from.depth - 1).find((node) => inside(from, node.cell));
  else if (event.key === "Escape" && place.root !== null) zoom(all[0].cell);
  else return;
  event.preventDefault();
  to?.focus();
}

// -- concepts over documents ---------------------------------------------------------------------

const CONCEPT_COLUMNS = [["name", "concept", ""], ...["documents", "tokens", "highest", "mean"].map((key) => [key, key, "number"]), ["", "documents, in the order of the input", "strip"]];
const ORDERS = { documents: (c) => concepts.documents[c], tokens: (c) => concepts.tokens[c], highest: (c) => concepts.highest[c], mean };
const nBins = heat.seen.length;
const binOf = (d) => Math.floor(d * nBins / nDocuments);
const firstOf = (b) => Math.ceil(b * nDocuments / nBins);

function binName(b) {
  const first = firstOf(b), last = firstOf(b + 1) - 1;
  return first === last ? idOf(first) : `documents ${count(first)} to ${count(last)}`;
}

/** Concepts with these characters in their id or their path, but for those that are excluded. */
function matching(q) {
  const low = q.toLowerCase(), names = concepts.name.map((name) => name.toLowerCase().includes(low));
  return [...concepts.id.keys()].filter((c) => !excluded.has(c) && (concepts.id[c].toLowerCase().includes(low) || path(c).some((a) => names[a])));
}

function drawConcepts() {
  const sort = place.sort === "name" || Object.hasOwn(ORDERS, place.sort) ? place.sort : "documents", scale = $("cells").value, found = matching(place.q);
  const byName = (a, b) => concepts.name[a] < concepts.name[b] ? -1 : concepts.name[a] > concepts.name[b] ? 1 : a - b;
  found.sort(sort === "name" ? byName : (a, b) => ORDERS[sort](b) - ORDERS[sort](a) || concepts.tokens[b] - concepts.tokens[a] || byName(a, b));
  if (document.activeElement !== $("concept-query")) $("concept-query").value = place.q;
  $("concept-count").textContent = `${count(found.length)} of ${plural(nConcepts, "concept")}${excluded.size ? `; ${count(excluded.size)} are excluded and not listed` : ""}`;
  const least = Math.floor(nDocuments / nBins), most = Math.ceil(nDocuments / nBins);
  $("bins").textContent = !nDocuments ? "" : `A cell is ${least === most ? "" : `${count(least)} or `}${plural(most, "document")}; hatched: nothing was seen there. ` +
    "Click it for its documents. Mean: over all tokens seen, an inactive probe counting as 0.";
  legend($("cells-legend"), scale);
  sortable($("concept-head"), CONCEPT_COLUMNS, sort);
  const page = pageOf(found), row = (c) => el("tr", {},
    td(concepts.documents[c] ? link({ concept: c }, named(c)) : named(c), el("span", { class: "path" }, above(c) || concepts.id[c])),
    right("documents", count(concepts.documents[c])), right("tokens", count(concepts.tokens[c])), right("highest", highestOf(c)), right("mean", mean(c).toFixed(4)),
    el("td", { class: "strip" }, strip(c, scale)));
  $("concept-rows").replaceChildren(...found.slice(PAGE * page, PAGE * (page + 1)).map(row));
  pager($("concept-pager"), found.length, PAGE, page, (to) => go({ ...place, page: to }));
}

const cellValue = { share: (c, b) => heat.tokens[c][b] / heat.seen[b], highest: (c, b) => heat.highest[c][b] / 1e6 };

function strip(c, scale) {
  if (!heat.tokens[c]) return "";
  const kind = (b) => !heat.seen[b] ? "blind" : heat.tokens[c][b] ? `s${shade(scale, cellValue[scale](c, b))}` : undefined;
  const label = `${concepts.name[c]} over the documents: arrow keys move, Enter lists`;
  const node = el("div", { class: "cells", tabindex: "0", role: "group", "aria-label": label }, heat.seen.map((_, b) => el("span", { class: kind(b) })));
  node.concept = c;
  return node;
}

function describeCell(cell) {
  const c = cell.parentElement.concept, b = [...cell.parentElement.children].indexOf(cell), n = heat.tokens[c][b], of = heat.seen[b];
  if (!of) return [binName(b), "nothing was seen here"];
  const told = [binName(b), `${concepts.name[c]}: over the floor at ${count(n)} of ${plural(of, "token")} (${percent(n / of)})`];
  return n ? [...told, `highest ${over(c, heat.highest[c][b] / 1e6)}`] : told;
}

function onStrip(event) {
  const cells = event.target.closest(".cells");
  if (!cells) return;
  const all = [...cells.children], at = all.findIndex((cell) => cell.classList.contains("at"));
  const clicked = event.type === "click" ? all.indexOf(event.target) : event.key === "Enter" ? at : -1;
  if (clicked >= 0) { tip.hidden = true; go({ view: "documents", concept: cells.concept, bin: clicked }); return; }
  const to = event.key === "ArrowRight" ? at + 1 : event.key === "ArrowLeft" ? Math.max(0, at - 1) : null;
  if (to === null || to >= all.length) return;
  event.preventDefault();
  all[at]?.classList.remove("at");
  all[to].classList.add("at");
  all[to].dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
}

// -- documents -----------------------------------------------------------------------------------

const ROWS = { order: null, tokens: documents.tokens, rows: documents.rows };

/** The documents that the place asks for, in its order: of a concept best first, of a stretch of the input, of a part of an id. */
function listed() {
  const { concept, bin } = place, low = place.q.toLowerCase(), key = Object.hasOwn(ROWS, place.sort) ? ROWS[place.sort] : null;
  let found = concept === null ? [...documents.id.keys()] : pairs.document.slice(pairs.ptr[concept], pairs.ptr[concept + 1]);
  if (concept !== null && place.sort === "order") found.sort((a, b) => a - b);
  if (bin !== null) found = found.filter((d) => binOf(d) === bin);
  if (low) found = found.filter((d) => documents.id[d].toLowerCase().includes(low));
  return key ? found.sort((a, b) => key[b] - key[a] || a - b) : found;
}

function drawDocuments() {
  const { concept } = place, found = listed(), page = pageOf(found), at = new Map();
  const sort = Object.hasOwn(ROWS, place.sort) ? place.sort : concept === null ? "order" : "best";
  if (document.activeElement !== $("document-query")) $("document-query").value = place.q;
  $("document-count").textContent = `${count(found.length)} of ${plural(nDocuments, "document")}`;
  drawRestriction();
  const ofConcept = concept === null ? [] : [["best", "highest", "number"], ["", "its tokens", "number"]];
  sortable($("document-head"), [["order", "document", ""], ...ofConcept, ["tokens", "tokens", "number"], ["rows", "over the floor", "number"], ["", "strongest concepts", "wide"]], sort);
  if (concept !== null) for (let i = pairs.ptr[concept]; i < pairs.ptr[concept + 1]; i++) at.set(pairs.document[i], i);
  const row = (d) => {
    const bad = d in documents.reasons, best = documents.best[d].flatMap((c, i) => [i ? ", " : "", link({ doc: d, concept: c }, named(c))]);
    return el("tr", {},
      td(el("a", { class: "id", href: hashOf({ ...place, view: null, page: 0, doc: d }) }, idOf(d)), !embedded.has(d) && !bad && el("span", { class: "path" }, "text not in this file")),
      ...(concept === null ? [] : [right("highest", score(pairs.highest[at.get(d)] / 1e6)), right("its tokens", count(pairs.tokens[at.get(d)]))]),
      right("tokens", count(documents.tokens[d])), right("over the floor", count(documents.rows[d])),
      el("td", { class: "wide" }, bad ? dim("span", `not scored: ${documents.reasons[d]}`) : unseenOf(d) ? [...best, best.length ? " · " : "", dim("span", unseenOf(d))] : best));
  };
  $("document-rows").replaceChildren(...found.slice(PAGE * page, PAGE * (page + 1)).map(row));
  pager($("document-pager"), found.length, PAGE, page, (to) => go({ ...place, page: to }));
}

/** Of which documents the list is, where it is not of all. */
function drawRestriction() {
  const { concept, bin } = place, told = [];
  if (concept !== null) {
    const held = pairs.ptr[concept + 1] - pairs.ptr[concept], all = concepts.documents[concept];
    const elsewhere = [link({ view: "documents", bin }, "Show all documents"), " · ", link({ view: "hierarchy", root: concept }, "In the hierarchy")];
    told.push(el("div", {}, "With ", named(concept), " over the floor, best first. ", elsewhere), el("div", { class: "path" }, above(concept)), dim("div", facts(concept).slice(1).join("; ")));
    if (held < all) told.push(el("div", {}, `This file holds the best ${count(held)} of its ${count(all)} documents: make the report with a larger --max-pairs for more.`));
  }
  if (bin !== null) told.push(el("div", {}, "Only ", el("bdi", {}, binName(bin)), " of the input. ", link({ view: "documents", concept }, "All of the input")));
  $("restriction").replaceChildren(...(told.length ? [el("div", { class: "restricted" }, told)] : []));
}

// -- a document ----------------------------------------------------------------------------------

let current = { d: null };

/** What the file holds of a document: text, tokens with their rows, and the concepts with how often and how strongly. */
function loadDocument(d) {
  const block = $(`document-${d}`), found = { d, text: null, tokens: [], list: false, present: new Map(), pinned: null };
  const add = (c, n, highest) => { const old = found.present.get(c) ?? { n: 0, highest: 0 }; found.present.set(c, { n: old.n + n, highest: Math.max(old.highest, highest) }); };
  if (!block) {
    for (let c = 0; c < nConcepts; c++) for (let i = pairs.ptr[c]; i < pairs.ptr[c + 1]; i++) if (pairs.document[i] === d) add(c, pairs.tokens[i], pairs.highest[i] / 1e6);
    return found;
  }
  const raw = JSON.parse(block.textContent);
  let position = 0, start = 0, row = 0;
  raw.n.forEach((n, k) => {
    position += raw.p[k]; start += raw.s?.[k] ?? 0;
    const rows = [];
    for (; n > 0; n--, row++) { rows.push([raw.c[row], raw.v[row] / 1e6]); add(raw.c[row], 1, raw.v[row] / 1e6); }
    rows.sort((a, b) => strength(...b) - strength(...a) || a[0] - b[0]);
    found.tokens.push({ position, start, end: start + (raw.l?.[k] ?? 0), rows, id: raw.i?.[k], text: raw.w ? raw.w[k] : raw.t.slice(start, start + raw.l[k]) });
  });
  found.text = raw.t;
  found.list = raw.w !== undefined; // tokens that cannot be shown in the text: there is none, or the tokenizer does not say where they stand
  return found;
}

const LONGEST = 8000, PART = 20000, SEGMENTS = 3000;

/** Segments in parts that are drawn at once; a long stretch is cut too, but not between the halves of a character. */
function inParts(found) {
  const parts = [[]];
  let chars = 0;
  for (const [text, tokens] of found) {
    for (let from = 0; from < text.length;) {
      let to = Math.min(text.length, from + LONGEST);
      if (to < text.length && (text.charCodeAt(to) & 0xfc00) === 0xdc00) to--;
      if (parts.at(-1).length && (chars + to - from > PART || parts.at(-1).length >= SEGMENTS)) { parts.push([]); chars = 0; }
      parts.at(-1).push([text.slice(from, to), tokens]);
      chars += to - from;
      from = to;
    }
  }
  return parts;
}

/** The shade of a segment's tokens: 0 where the chosen concept is not over the floor there. */
function tokenShade(tokens) {
  const scale = $("colour").value, rows = tokens.flatMap((token) => token.rows).filter(([c]) => place.concept === null || c === place.concept);
  if (!rows.length) return 0;
  if (scale === "count") return shade(scale, new Set(rows.map(([c]) => c)).size);
  return shade(scale, Math.max(...rows.map(([c, x]) => scale === "strength" ? strength(c, x) : x)));
}

function drawReader() {
  const d = place.doc, held = embedded.has(d);
  if (current.d !== d) { current = loadDocument(d); drawToken([]); drawPresent(MARKED); }
  const { concept, bin, q, sort } = place, order = listed(), i = order.indexOf(d);
  const turn = (to, text) => to === undefined ? dim("span", text) : link({ concept, bin, q, sort, doc: to }, text);
  $("turn").replaceChildren(link({ view: "documents", concept, bin, q, sort }, concept === null ? "All documents" : el("span", {}, "Documents with ", named(concept))),
    ...(i < 0 ? [] : [el("span", {}, turn(order[i - 1], "previous"), " · ", turn(order[i + 1], "next"))]));
  $("document-id").textContent = idOf(d);
  $("document-facts").textContent = factsOf(d);
  $("missing").textContent = missing(d);
  $("missing").hidden = !missing(d);
  for (const id of ["text", "colour-legend", "token"]) $(id).hidden = !held;
  if (held) drawText();
  for (const node of document.querySelectorAll("aside .concept")) node.setAttribute("aria-pressed", String(node.concept === place.concept));
}

function factsOf(d) {
  const each = (name) => seen[d] ? (documents[name][d] / seen[d]).toFixed(1) : 0;
  if (d in documents.reasons) return `Document ${count(d)} of the input.`;
  return `Document ${count(d)} of the input: ${plural(documents.tokens[d], "token")}, ${documents.unseen[d] ? `${count(documents.unseen[d])} of them unseen` : "all seen"}; ` +
    `${documents.far[d] ? `${count(documents.far[d])} unlike the text that the pack was calibrated on; ` : ""}${plural(documents.rows[d], "score")} over the floor. A token: ${each("active")} probes active, ${each("dropped")} dropped, ${each("not_reached")} not reached${totals.excluded ? ` (${each("excluded")} of them excluded)` : ""}, ${each("evaluated")} evaluated.`;
}

/** Why a document is not shown as others are, and what helps. */
function missing(d) {
  if (d in documents.reasons) return `This document was not scored: ${documents.reasons[d]}. Nothing is known about its contents.`;
  if (!embedded.has(d)) {
    const texts = nDocuments - Object.keys(documents.reasons).length;
    return `The text of this document is not in this file, which holds ${count(embedded.size)} of ${plural(texts, "text")} within its budget of ${made.text_megabytes} MB, ` +
      "the best documents of each concept first. Make the report with a larger --text-megabytes to have it." +
      (made.per_concept === null ? "" : " Only concepts for which it is among the best documents are listed.");
  }
  if (current.text === null) return "The analysis was made without keeping the texts (--no-text): these are its tokens over the floor.";
  return current.list ? "The tokenizer does not give the places of its tokens in the text: they are listed below it." : "";
}

function drawText() {
  const box = $("text"), { concept } = place;
  const mark = (tokens, ...inside) => {
    const node = el("span", { class: `s${tokenShade(tokens)}${tokens === current.pinned ? " pinned" : ""}`, tabindex: "-1" }, ...inside);
    node.tokens = tokens;
    return node;
  };
  const listing = ([text, tokens]) => mark(tokens, el("small", {}, String(tokens[0].position)), text);
  const inText = ([text, tokens]) => {
    // The space before a word is of its token, but a mark looks like a word's when it begins where that does.
    const lead = text.length - text.trimStart().length, blank = lead === text.length ? 0 : lead;
    return tokens.length ? [text.slice(0, blank), mark(tokens, text.slice(blank))] : text;
  };
  current.parts ??= inParts(current.list ? current.tokens.map((token) => [called(token), [token]]) : segments(current.text, current.tokens));
  const part = Math.min(place.part, current.parts.length - 1), whole = current.list && current.text !== null && part === 0;
  box.className = current.list ? "text list" : "text";
  box.replaceChildren(...(whole ? [el("div", { class: "whole" }, current.text), el("hr")] : []), ...current.parts[part].flatMap(current.list ? listing : inText));
  const first = box.querySelector("span");
  if (first) first.tabIndex = 0;
  legend($("colour-legend"), $("colour").value);
  if (concept !== null) {
    const there = current.present.has(concept) ? " is coloured. " : " is coloured, but it is not over the floor here. ";
    $("colour-legend").prepend(el("span", {}, "Only ", named(concept), there, link({ ...place, concept: null, view: null }, "Colour by all"), "\u2003"));
  }
  pager($("parts"), current.parts.length, 1, part, (to) => go({ ...place, view: null, part: to }));
}

const called = (token) => token.text || (token.id < 0 ? "·" : `token ${token.id}`); // below 0: not kept

function conceptButton(c, told, value) {
  const choose = () => go({ ...place, view: null, concept: c === place.concept ? null : c }, true);
  const swatch = `swatch s${shade(concepts.threshold[c] === null ? "score" : "strength", strength(c, value))}`;
  const node = el("button", { class: "concept", type: "button", "aria-pressed": String(c === place.concept), click: choose },
    el("span", {}, el("i", { class: swatch }), named(c)), el("span", { class: "number" }, told), el("span", { class: "path" }, above(c)));
  node.concept = c; // drawn once and pressed in place: one that is made anew would lose the focus
  return node;
}

/** The concepts at the tokens of a segment, strongest first; [] clears it. */
function drawToken(tokens) {
  const told = (c, x) => concepts.threshold[c] === null ? score(x) : `${score(x)} over ${score(concepts.threshold[c])}`;
  const shown = tokens.flatMap((token) => [
    el("div", {}, el("bdi", { class: "quoted" }, called(token)), dim("span", `  token ${count(token.position)}`)), ...token.rows.map(([c, x]) => conceptButton(c, told(c, x), x)),
  ]);
  const hint = dim("p", "Point at a coloured token, or move to it with the arrow keys, to see its concepts with their scores and thresholds. Click keeps it here.");
  $("token").toggleAttribute("data-empty", !tokens.length);
  $("token").replaceChildren(...(tokens.length ? shown : [hint]));
}

function drawPresent(n) {
  const all = [...current.present].sort(([a, x], [b, y]) => strength(b, y.highest) - strength(a, x.highest) || a - b);
  const shown = all.filter(([c], i) => i < n || c === place.concept).map(([c, { n: times, highest }]) => conceptButton(c, `${score(highest)} · ${plural(times, "token")}`, highest));
  if (all.length > shown.length) shown.push(button(`All ${count(all.length)}`, () => drawPresent(all.length)));
  $("present").replaceChildren(...(all.length ? shown : [dim("p", seen[current.d] ? "None over the floor." : "No token of it was seen, so nothing is known about it.")]));
}

function pin(node) {
  $("text").querySelector(".pinned")?.classList.remove("pinned");
  current.pinned = node === null || current.pinned === node.tokens ? null : node.tokens;
  if (current.pinned) node.classList.add("pinned");
}

function onToken(event) {
  const node = event.target.closest("#text span");
  if (!node?.tokens) return;
  if (event.type === "click" || event.key === "Enter") { pin(node); drawToken(node.tokens); }
  else if (event.key === "Escape") pin(null);
  else if (event.type === "keydown") {
    const all = [...$("text").querySelectorAll("span")], step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const to = step && all[all.indexOf(node) + step];
    if (!to) return;
    event.preventDefault();
    node.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  } else if (!current.pinned) drawToken(node.tokens);
}

// -- all of it -----------------------------------------------------------------------------------

function render() {
  const before = place;
  place = readPlace();
  tip.hidden = true;
  const reading = place.view === "documents" && place.doc !== null;
  for (const id of [...VIEWS, "reader"]) $(id).hidden = id !== (reading ? "reader" : place.view);
  document.querySelectorAll("nav a").forEach((a, i) => VIEWS[i] === place.view ? a.setAttribute("aria-current", "page") : a.removeAttribute("aria-current"));
  ({ overview: drawOverview, hierarchy: drawHierarchy, concepts: drawConcepts, documents: reading ? drawReader : drawDocuments })[place.view]();
  if (["view", "doc", "page", "part"].some((name) => place[name] !== before[name])) scrollTo(0, 0);
}

$("title").textContent = data.title;
$("watched").textContent = data.watched;
choices($("shade"), ["share", "mean", "highest"], "share");
choices($("cells"), ["share", "highest"], "share");
const thresholds = concepts.threshold.some((x) => x !== null) ? ["strength"] : [];
choices($("colour"), [...thresholds, "score", "count"], [...thresholds, "score"][0]);
tips(tip, $("icicle"), "button", ({ cell: { c, rest } }) => {
  if (!rest) return c === null ? ["All concepts", `${count(totals.rows)} scores over the floor`] : facts(c);
  return [`${plural(rest.length, "narrower concept")}${c === null ? "" : ` below ${concepts.name[c]}`}`, rest.slice(0, 5).map((n) => concepts.name[n]).join(", ") + (rest.length > 5 ? ", …" : "")];
});
tips(tip, $("concept-rows"), ".cells span", describeCell);
$("icicle").addEventListener("click", (event) => event.target.cell && zoom(event.target.cell));
$("icicle").addEventListener("keydown", moveInIcicle);
for (const name of ["click", "keydown"]) $("concept-rows").addEventListener(name, onStrip);
for (const name of ["pointerover", "focusin", "click", "keydown"]) $("text").addEventListener(name, onToken);
for (const id of ["concept-query", "document-query"]) $(id).addEventListener("input", (event) => go({ ...place, q: event.target.value, page: 0 }, true));
addEventListener("hashchange", render);
addEventListener("resize", () => { if (place.view === "hierarchy") drawHierarchy(); });
render();
