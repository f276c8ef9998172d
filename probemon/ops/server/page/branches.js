// A colour for each branch of a pack's hierarchy, the same in every answer. Names tell concepts of one branch apart.

const HUES = 8;
const MOST = 0.2; // of the concepts in one branch
const LINES = 4;
const TRUNK = "h8 l0"; // concepts above several branches are grey

/**
 * The branches of a pack, the largest first: {list, of}, `list` the concepts at whose heads they are, `of[c]` the place
 * of c's branch in it, -1 above several. A branch with more than a fifth of the concepts is cut into those below it.
 */
export function branchesOf(pack) {
  if (!cache.has(pack)) cache.set(pack, cut(pack));
  return cache.get(pack);
}
const cache = new WeakMap();

function cut({ concepts, children, roots }) {
  const size = concepts.map(() => 1);
  const order = [];
  for (const stack = [...roots]; stack.length;) {
    const c = stack.pop();
    order.push(c);
    stack.push(...children[c]);
  }
  for (const c of order.reverse()) for (const child of children[c]) size[c] += size[child];
  const list = [];
  for (const waiting = [...roots]; waiting.length;) {
    const c = waiting.pop();
    if (size[c] > MOST * concepts.length && children[c].length) waiting.push(...children[c]);
    else list.push(c);
  }
  list.sort((a, b) => size[b] - size[a] || a - b);
  const of = concepts.map(() => -1);
  list.forEach((head, i) => {
    for (const stack = [head]; stack.length;) {
      const c = stack.pop();
      of[c] = i;
      stack.push(...children[c]);
    }
  });
  return { list, of };
}

/** The classes of a concept's colour and kind of line. */
export function colourOf(pack, c) {
  const i = branchesOf(pack).of[c];
  return i < 0 ? TRUNK : `h${i % HUES} l${Math.floor(i / HUES) % LINES}`;
}

/** The heads of the branches of these concepts, the largest first; null for the concepts above several. */
export function headsOf(pack, concepts) {
  const { list, of } = branchesOf(pack);
  const found = [...new Set(concepts.map((c) => of[c]))].sort((a, b) => a - b);
  return found.map((i) => (i < 0 ? null : list[i]));
}
