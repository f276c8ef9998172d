// A tip under the pointer or the focus.

import { el } from "./elements.js";

/**
 * Show in `tip` the lines that `describe(node)` returns, for a node of `container` that the selector picks; no lines,
 * no tip.
 */
export function tips(tip, container, selector, describe) {
  let shown = null;
  const show = (event) => {
    const node = event.target.closest(selector);
    if (event.type === "pointermove" && node === shown) return;
    shown = node;
    const lines = node ? describe(node) : [];
    tip.hidden = !lines.length;
    if (tip.hidden) return;
    tip.replaceChildren(...lines.map((line) => el("div", {}, line)));
    const at = node.getBoundingClientRect();
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - box.width - 8))}px`;
    const below = at.bottom + box.height + 10 < innerHeight;
    tip.style.top = `${below ? at.bottom + 6 : Math.max(4, at.top - box.height - 6)}px`;
  };
  container.addEventListener("pointermove", show); // not pointerover, which comes when things move under the pointer
  container.addEventListener("focusin", show);
  for (const name of ["pointerleave", "focusout"])
    container.addEventListener(name, () => {
      shown = null;
      tip.hidden = true;
    });
}
