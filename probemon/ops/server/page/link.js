// The place: which answer is shown, and what of it is pinned. It is kept in the address's hash, so that an address is a
// permanent link.
//
//   #answer=chatcmpl-1&choice=0&token=57&concept=whale.n.02
//
// What of a hash is not understood is left out. A hash that holds `token` without `answer` is the server's secret: see
// session.js.

export const NOWHERE = { answer: null, choice: 0, token: null, concept: null };

const whole = (text) => (/^\d{1,9}$/.test(text ?? "") ? Number(text) : null);

export function readPlace(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const answer = given.get("answer") || null;
  if (answer === null) return { ...NOWHERE };
  return {
    answer,
    choice: whole(given.get("choice")) ?? 0,
    token: whole(given.get("token")),
    concept: given.get("concept") || null,
  };
}

export function hashOf(place) {
  if (place.answer === null) return "#";
  const given = new URLSearchParams({ answer: place.answer });
  if (place.choice) given.set("choice", place.choice);
  if (place.token !== null) given.set("token", place.token);
  if (place.concept !== null) given.set("concept", place.concept);
  return `#${given}`;
}
