// Names over the tokens of an answer: each has the room up to the next one of its line.

const GAP = 5; // pixels
const LEAST = 13;

/** Give every name in a box its room; needed when names or the width have changed. */
export function fitLabels(box) {
  const width = box.clientWidth;
  if (!width || (box.fitted === width && !box.unfitted)) return;
  const rtl = getComputedStyle(box).direction === "rtl";
  const { left, right } = box.getBoundingClientRect();
  const nodes = [...box.querySelectorAll(".tok[data-mark]")];
  const places = nodes.map((node) => {
    const place = node.getClientRects()[0];
    return place ? { top: place.top, at: rtl ? right - place.right : place.left - left } : null;
  });
  nodes.forEach((node, i) => {
    const [here, next] = [places[i], places[i + 1]];
    if (!here) return;
    const end = next && Math.abs(next.top - here.top) < 6 && next.at > here.at ? next.at - GAP : width;
    const room = Math.floor(end - here.at);
    node.style.setProperty("--room", `${Math.max(0, room)}px`);
    node.classList.toggle("tight", room < LEAST);
  });
  box.fitted = width;
  box.unfitted = false;
}
