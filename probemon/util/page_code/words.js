// Numbers in words.

export const count = (n) => n.toLocaleString("en");
export const plural = (n, one, many = one + "s") => `${count(n)} ${n === 1 ? one : many}`;
/** Three digits, and near 0 and 1 two of what lies between. */
export function score(x) {
  if (x > 0 && x < 0.01) return x.toPrecision(2);
  return x.toFixed(x > 0.999 && x < 1 ? 1 - Math.floor(Math.log10(1 - x)) : 3);
}
export const percent = (x) => (x === 0 ? "0 %" : x < 0.001 ? "<0.1 %" : `${(100 * x).toFixed(x < 0.1 ? 1 : 0)} %`);
