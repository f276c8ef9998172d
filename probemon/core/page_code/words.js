// Numbers in words.

export const count = (n) => n.toLocaleString("en");
export const plural = (n, one, many = one + "s") => `${count(n)} ${n === 1 ? one : many}`;
export const score = (x) => (x > 0 && x < 0.01 ? x.toPrecision(2) : x.toFixed(3));
export const percent = (x) => (x === 0 ? "0 %" : x < 0.001 ? "<0.1 %" : `${(100 * x).toFixed(x < 0.1 ? 1 : 0)} %`);
