// Signing in by a token, and out again.

import { hasToken, keep } from "./token.js";
import { byId, setText } from "./words.js";

/** The characters that a header can have. */
const SENDABLE = /^[\x21-\x7e]+$/;

/** The form that asks for a token, and the button that forgets it. */
export class Session {
  #asked = false;
  #shown = false;

  constructor(changed) {
    byId("sign-in").addEventListener("submit", (event) => {
      event.preventDefault();
      const token = byId("token").value.trim();
      byId("token").value = "";
      if (!SENDABLE.test(token)) {
        setText(byId("sign-in-said"), "A token has only letters, digits and punctuation: copy it again.");
        return;
      }
      keep(token);
      // What was shown before may be another one's.
      if (this.#shown) location.reload();
      else changed();
    });
    byId("sign-out").addEventListener("click", () => {
      keep(null);
      // What the page holds of the server goes with it.
      location.reload();
    });
    byId("sign-out").hidden = !hasToken();
  }

  /** Whether the server wants a token that the page does not have: nothing is asked meanwhile. */
  get asks() {
    return this.#asked;
  }

  /** Ask for a token, and say why; what was shown is hidden. */
  ask(why) {
    if (!this.#asked) {
      this.#asked = true;
      document.body.toggleAttribute("data-asks", true);
      byId("sign-in").hidden = false;
      byId("token").focus();
    }
    byId("sign-out").hidden = !hasToken();
    setText(byId("sign-in-said"), why);
  }

  /** Show the server: it has answered. */
  admit() {
    this.#shown = true;
    byId("sign-out").hidden = !hasToken();
    document.body.toggleAttribute("data-token", hasToken());
    if (!this.#asked) return;
    this.#asked = false;
    document.body.toggleAttribute("data-asks", false);
    byId("sign-in").hidden = true;
    byId("content").focus({ preventScroll: true });
  }
}
