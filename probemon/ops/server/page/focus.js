// What is drawn anew keeps the focus, so that who goes by keys stays where they are.

/**
 * Put `nodes` into a box in place of what is there. Where the focus was in an element with a `data-stop`, the new one
 * with the same has it, or else the first.
 */
export function refill(box, ...nodes) {
  const stop = box.contains(document.activeElement) ? document.activeElement.dataset.stop : undefined;
  box.replaceChildren(...nodes);
  if (stop === undefined) return;
  const same = box.querySelector(`[data-stop="${CSS.escape(stop)}"]`) ?? box.querySelector("[data-stop]");
  same?.focus({ preventScroll: true });
}
