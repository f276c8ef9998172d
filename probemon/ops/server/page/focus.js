// Lists that are one tab stop each, and keep the focus when they are drawn anew.

const stopsOf = (box) => [...box.querySelectorAll(box.stops ?? "[data-stop]")];

function settle(box, stop) {
  for (const node of stopsOf(box)) node.tabIndex = node === stop ? 0 : -1;
}

/**
 * Put `nodes` into a box in place of what is there. Where the focus was in an element with a `data-stop`, the new one
 * with the same has it, or else the first.
 */
export function refill(box, ...nodes) {
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.stop : undefined;
  box.replaceChildren(...nodes);
  const find = (name) => name !== undefined && box.querySelector(`[data-stop="${CSS.escape(name)}"]`);
  const first = box.querySelector("[data-stop]");
  if (box.roves) settle(box, find(focused ?? box.stop) || first);
  if (focused !== undefined) (find(focused) || first)?.focus({ preventScroll: true });
}

/** Make a list one tab stop: the arrow keys, Home and End move among its elements with a `data-stop`, or `stops`. */
export function rove(box, stops) {
  box.roves = true;
  box.stops = stops;
  settle(box, stopsOf(box)[0]);
  box.addEventListener("focusin", ({ target }) => {
    if (!stopsOf(box).includes(target)) return;
    box.stop = target.dataset.stop;
    settle(box, target);
  });
  box.addEventListener("keydown", (event) => {
    const all = stopsOf(box);
    const i = all.indexOf(event.target);
    if (i < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const to = {
      ArrowDown: all[i + 1],
      ArrowRight: all[i + 1],
      ArrowUp: all[i - 1],
      ArrowLeft: all[i - 1],
      Home: all[0],
      End: all.at(-1),
    }[event.key];
    if (!to) return;
    event.preventDefault();
    to.focus();
  });
}
