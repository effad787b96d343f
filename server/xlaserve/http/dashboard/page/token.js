// The token of this tab: kept in its session storage, and sent with each request of the page.

const KEY = "xlaserve token";
let token = stored();
/** Statuses of a server that does not know who asks, or does not permit it. */
const [UNKNOWN, REFUSED] = [401, 403];

/** Keep a token for this tab; null forgets it. */
export function keep(given) {
  token = given;
  try {
    if (given === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, given);
  } catch {
    // The browser keeps nothing of sites: the token is kept as long as the page is open.
  }
}

function stored() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

export const hasToken = () => token !== null;

/** Fetch with the token of this tab, if it has one. */
export function request(path, options = {}) {
  if (token === null) return fetch(path, options);
  return fetch(path, { ...options, headers: { ...options.headers, Authorization: `Bearer ${token}` } });
}

/** Say what an answer means that lets nobody in; null for any other. */
export function refusal(status, text) {
  if (status === UNKNOWN && !hasToken()) return "Sign in to see your models.";
  if (status === UNKNOWN) {
    return "401: the server does not know this token, or it has expired. Sign in with another one.";
  }
  if (status !== REFUSED) return null;
  return `403: ${text}. Or sign in with another token.`;
}
