// The place: which answer is shown, what of it is pinned, and which one is compared with it. It is kept in the
// address's hash, so that an address is a permanent link.
//
//   #answer=chatcmpl-1&choice=0&token=57&concept=whale.n.02&with=chatcmpl-2&with_choice=1
//
// What of a hash is not understood is left out. A hash that holds `token` without `answer` is the server's secret: see
// session.js.

export const NOWHERE = { answer: null, choice: 0, token: null, concept: null, other: null, otherChoice: 0 };

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
    other: given.get("with") || null,
    otherChoice: whole(given.get("with_choice")) ?? 0,
  };
}

export function hashOf(place) {
  if (place.answer === null) return "#";
  const given = new URLSearchParams({ answer: place.answer });
  if (place.choice) given.set("choice", place.choice);
  if (place.token !== null) given.set("token", place.token);
  if (place.concept !== null) given.set("concept", place.concept);
  if (place.other !== null) given.set("with", place.other);
  if (place.other !== null && place.otherChoice) given.set("with_choice", place.otherChoice);
  return `#${given}`;
}
