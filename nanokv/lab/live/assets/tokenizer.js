"use strict";
// Text ↔ token ids: byte-level BPE from tokenizer.json, and the bundled model's chat template.
// Gives the same ids as nanokv.text.tokenizer; tests/lab/test_live.py compares them.

// Qwen2's pattern. Not every browser has (?i:…), so both cases are written. ſ is there because
// Unicode's case folding makes it an s.
const PIECE = new RegExp(
  "'[sSſ]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" +
    "| ?[^\\p{White_Space}\\p{L}\\p{N}]+[\\r\\n]*|\\p{White_Space}*[\\r\\n]+" +
    "|\\p{White_Space}+(?!\\P{White_Space})|\\p{White_Space}+",
  "gu",
);

function byteLetters() {
  // byte → the visible character that stands for it in the vocabulary (GPT-2's map)
  const own = (b) => (b > 32 && b < 127) || (b > 160 && b < 256 && b !== 173);
  let moved = 256;
  return Array.from({ length: 256 }, (_, b) => String.fromCharCode(own(b) ? b : moved++));
}

class Tokenizer {
  constructor({ added_tokens: added, model: { vocab, merges } }) {
    this.idOf = new Map(Object.entries(vocab));
    this.rank = new Map(merges.map((pair, rank) => [pair.join(" "), rank]));
    this.letters = byteLetters();
    this.byteOf = new Map(this.letters.map((letter, byte) => [letter, byte]));
    this.special = new Map(added.map(({ content, id }) => [content, id]));
    const literal = added.map(({ content }) => content.replace(/[^\w]/g, "\\$&"));
    this.specials = new RegExp(`(${literal.join("|")})`);
    this.tokenOf = new Map([...this.idOf, ...this.special].map(([token, id]) => [id, token]));
    this.known = new Map(); // word → ids; a cache, because texts repeat words
  }

  encode(text) {
    const ids = [];
    for (const part of text.split(this.specials)) {
      if (this.special.has(part)) ids.push(this.special.get(part));
      else
        for (const [word] of part.normalize("NFC").matchAll(PIECE)) ids.push(...this.wordIds(word));
    }
    return ids;
  }

  wordIds(word) {
    if (!this.known.has(word)) {
      const bytes = new TextEncoder().encode(word);
      const merged = this.merge(Array.from(bytes, (byte) => this.letters[byte]));
      this.known.set(
        word,
        merged.map((part) => this.idOf.get(part)),
      );
    }
    return this.known.get(word);
  }

  merge(parts) {
    // join the pair that was learned first, until no learned pair is left
    for (;;) {
      let best = Infinity;
      let at = -1;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.rank.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity;
        if (rank < best) [best, at] = [rank, i];
      }
      if (at < 0) return parts;
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  }

  bytes(id) {
    const token = this.tokenOf.get(id) ?? "";
    const isText = !this.special.has(token);
    return isText
      ? Uint8Array.from(token, (letter) => this.byteOf.get(letter))
      : new TextEncoder().encode(token);
  }

  decode(ids) {
    // control tokens are left out
    const shown = ids.filter((id) => !this.special.has(this.tokenOf.get(id)));
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(
      Uint8Array.from(shown.flatMap((id) => [...this.bytes(id)])),
    );
  }

  piece(id) {
    // one token as visible text; incomplete characters as bytes, like \xe2
    const bytes = this.bytes(id);
    try {
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    } catch {
      return Array.from(bytes, (b) =>
        b < 128 ? String.fromCharCode(b) : `\\x${b.toString(16)}`,
      ).join("");
    }
  }

  render(messages) {
    // [{role, content}] → the prompt for the next answer
    const turn = ({ role, content }) =>
      `<|im_start|>${role}\n${role === "user" ? " " : ""}${content}<|im_end|>\n`;
    return `${messages.map(turn).join("")}<|im_start|>assistant\n`;
  }
}
