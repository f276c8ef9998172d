// The server's secret: taken from the address that `probemon serve` printed, kept for this tab alone, sent in a header,
// never in an address.

const NAME = "probemon-token";
const ASKED = "probemon-asked";
const MOST_ASKED = 500;

/** Move the secret from a hash like `#token=...` into the session, and return whether there was one. */
export function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (!given.get("token") || given.get("answer")) return false;
  keepToken(given.get("token"));
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

/** Keep a secret: the token, or the whole address or line in which it stands. */
export function keepToken(text) {
  const token = text.match(/#token=([^\s&]+)/)?.[1] ?? text.trim();
  sessionStorage.setItem(NAME, token);
}

export const hasToken = () => sessionStorage.getItem(NAME) !== null;

/** The ids of the requests that this tab has sent, and one more that it remembers over a reload. */
export function ownRequests() {
  const kept = JSON.parse(sessionStorage.getItem(ASKED) ?? "[]");
  const own = new Set(kept);
  return {
    has: (id) => own.has(id),
    add(id) {
      own.add(id);
      sessionStorage.setItem(ASKED, JSON.stringify([...own].slice(-MOST_ASKED)));
    },
  };
}

export function headers(more = {}) {
  const token = sessionStorage.getItem(NAME);
  return token ? { Authorization: `Bearer ${token}`, ...more } : more;
}
