// The hierarchy as a tree that opens where the answer went: a concept and the token at which it first fired, those
// below it in that order.

import { $, el } from "./elements.js";
import { plural } from "./words.js";
import { strengthAt, tint } from "./digest.js";
import { swatch } from "./parts.js";
import { nameOf, numbered, strengthOf, toldOf } from "./said.js";

const opened = new WeakMap();

/**
 * Of a pack's concepts by their numbers: `toggled`, opened or closed by hand; `quiet`, whose quiet children are listed
 * (null: the roots).
 */
function openedOf(pack) {
  if (!opened.has(pack)) opened.set(pack, { toggled: new Map(), quiet: new Set() });
  return opened.get(pack);
}

/** Rows {c, depth, open, nQuiet} as they stand below each other; c is null for a row that stands for quiet concepts. */
function rowsOf(view) {
  const { pack, digest } = view;
  const { toggled, quiet } = openedOf(pack);
  const rows = [];
  const inside = new Set();
  // first parents: each concept is placed once
  for (const c of digest.concepts.keys()) for (const a of pack.path(c)) inside.add(a);
  const first = (c) => digest.concepts.get(c)?.first ?? Infinity;
  const list = (parent, children, depth) => {
    const shown = children.filter((c) => inside.has(c)).sort((a, b) => first(a) - first(b) || a - b);
    const others = children.filter((c) => !inside.has(c));
    const add = (c) => {
      const open = pack.children[c].length > 0 && (toggled.get(c) ?? inside.has(c));
      rows.push({
        c,
        parent,
        depth,
        open,
        leaf: !pack.children[c].length,
        nQuiet: open ? pack.children[c].filter((child) => !inside.has(child)).length : 0,
        listed: quiet.has(c),
      });
      if (open) list(c, pack.children[c], depth + 1);
    };
    shown.forEach(add);
    if (others.length && quiet.has(parent)) others.forEach(add);
    if (others.length && parent === null)
      rows.push({ c: null, parent, depth, open: quiet.has(parent), leaf: true, nQuiet: others.length });
  };
  list(null, pack.roots, 0);
  return rows;
}

function rowNode(app, view, row) {
  const { pack, digest, choice, at } = view;
  const { c, depth } = row;
  const quiet = toldOf(view) ? "did not fire (only requested ones are reported)" : "did not fire";
  if (c === null) {
    return el(
      "div",
      { role: "treeitem", "aria-level": depth + 1, class: "node quiet", tabindex: "-1" },
      el("span", { class: "twist" }, ""),
      el(
        "span",
        { class: "dim" },
        `${row.open ? "hide " : ""}${plural(row.nQuiet, "concept")} that ${quiet}${row.open ? "" : " …"}`,
      ),
    );
  }
  const known = digest.concepts.get(c);
  const token = at === null ? null : choice.tokens[at];
  const fires = token !== null && at <= view.upto && token.fired.includes(c);
  const told = fires ? strengthAt(token, c) : null;
  const kinds = [
    "node",
    fires ? `fires t${tint(told)}` : known ? "fired" : "quiet",
    view.concept === c ? "chosen" : "",
  ];
  const when = known ? numbered(choice, known.first) : "";
  const history = known ? `fires at ${plural(known.n, "token")}, first ${when}` : quiet;
  return el(
    "div",
    {
      role: "treeitem",
      "aria-level": depth + 1,
      "aria-expanded": row.leaf ? undefined : String(row.open),
      "aria-selected": String(view.concept === c),
      class: kinds.join(" ").trim(),
      tabindex: "-1",
      "aria-label": `${nameOf(pack, c)}${fires ? ", fires at this token" : ""}, ${history}`,
      title: known ? history : undefined,
    },
    el("span", { class: "twist", "aria-hidden": "true" }, row.leaf ? "" : row.open ? "▾" : "▸"),
    el("span", { class: "dot", "aria-hidden": "true" }, fires ? "●" : known ? "○" : "·"),
    known ? swatch(pack, c) : "",
    el("bdi", { class: "name" }, nameOf(pack, c)),
    row.nQuiet > 0 &&
      el(
        "span",
        {
          class: "others",
          title: `${row.listed ? "hide" : "show"} ${plural(row.nQuiet, "concept")} below it that ${quiet} (key: +)`,
        },
        row.listed ? "−" : `+${row.nQuiet}`,
      ),
    el(
      "span",
      { class: "when" },
      [fires && strengthOf(pack, c, told), known && plural(known.n, "token")].filter(Boolean).join(" · "),
    ),
  );
}

export function drawTree(app, view) {
  const box = $("tree");
  $("tree-panel").classList.toggle("empty", view === null);
  if (view === null) {
    box.replaceChildren();
    box.key = null;
    return;
  }
  const rows = rowsOf(view);
  const key = JSON.stringify([
    rows,
    view.at === null ? null : view.choice.tokens[view.at].fired,
    view.at,
    view.concept,
    [...view.digest.concepts.values()].map(({ n }) => n),
    view.digest.marks.size,
  ]);
  if (box.choice === view.choice && box.key === key) return;
  const focused = box.contains(document.activeElement) ? document.activeElement.row : null;
  const same = (row) => focused && row.c === focused.c && row.parent === focused.parent;
  const nodes = rows.map((row) => {
    const node = rowNode(app, view, row);
    node.row = row;
    node.style.setProperty("--depth", String(row.depth));
    return node;
  });
  box.replaceChildren(...nodes);
  const stop = nodes.find((node) => same(node.row)) ?? nodes[0];
  if (stop) {
    stop.tabIndex = 0;
    if (focused) stop.focus();
  }
  box.choice = view.choice;
  box.key = key;
}

function toggle(app, { c, open, leaf }, to = !open) {
  if (c === null) {
    toggleQuiet(app, null);
    return;
  }
  const { toggled, quiet } = openedOf(app.view().pack);
  if (!leaf) toggled.set(c, to);
  if (to && !leaf) quiet.add(c); // of one that is opened by hand all children are wanted
  app.draw();
}

function toggleQuiet(app, parent) {
  const { quiet } = openedOf(app.view().pack);
  if (!quiet.delete(parent)) quiet.add(parent);
  app.draw();
}

/** Let pointer and keys walk the tree, as trees are walked everywhere. */
export function walkTree(app) {
  const box = $("tree");
  box.addEventListener("click", (event) => {
    const node = event.target.closest(".node");
    if (!node) return;
    if (event.target.closest(".others")) toggleQuiet(app, node.row.c);
    else if (node.row.c === null || event.target.closest(".twist")) toggle(app, node.row);
    else app.choose(node.row.c);
  });
  box.addEventListener("keydown", (event) => {
    const node = event.target.closest(".node");
    if (!node) return;
    const all = [...box.children];
    const i = all.indexOf(node);
    const { row } = node;
    const go = (to) => {
      if (to) {
        node.tabIndex = -1;
        to.tabIndex = 0;
        to.focus();
      }
    };
    if (event.key === "ArrowDown") go(all[i + 1]);
    else if (event.key === "ArrowUp") go(all[i - 1]);
    else if (event.key === "Home") go(all[0]);
    else if (event.key === "End") go(all.at(-1));
    else if (event.key === "ArrowRight") {
      if (row.leaf || row.open) go(all[i + 1]);
      else toggle(app, row, true);
    } else if (event.key === "ArrowLeft") {
      if (!row.leaf && row.open) toggle(app, row, false);
      else
        go(
          all
            .slice(0, i)
            .reverse()
            .find((other) => other.row.depth < row.depth),
        );
    } else if (event.key === "+" && row.nQuiet) toggleQuiet(app, row.c);
    else if (event.key === "Enter" || event.key === " ") {
      if (row.c === null) toggle(app, row);
      else app.choose(row.c);
    } else return;
    event.preventDefault();
  });
}
