// Parses server-sent events from pieces of text.

/** Limit on the length of an event. The counts of the largest model have about 1 MB. */
const MAX_CHARS = 32 * 1024 * 1024;

/** Parses events and calls `onEvent(name, data)` after the last line of each event. */
export class EventParser {
  constructor(onEvent) {
    this.onEvent = onEvent;
    this.rest = "";
    this.name = "";
    this.data = [];
  }

  add(text) {
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    if (this.rest.length > MAX_CHARS) throw new Error("the service sent an event that is too large");
    for (const line of lines) this.#line(line.endsWith("\r") ? line.slice(0, -1) : line);
  }

  #line(line) {
    if (line === "") {
      const [name, data] = [this.name || "message", this.data.join("\n")];
      this.name = "";
      this.data = [];
      if (data) this.onEvent(name, data);
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return;
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "event") this.name = value;
    else if (field === "data") this.data.push(value);
  }
}
