// The service's history of the last hour. The page requests all of it once, and then only new points.

import { ask } from "./session.js";

/** Number of points in an hour. */
const MAX_POINTS = 720;
const nothing = (length) => new Array(length).fill(null);

/** Append new points to the known points, with null where a series has none. Returns all series by name. */
export function joined(known, added, before, number) {
  const names = new Set([...Object.keys(known), ...Object.keys(added)]);
  const pad = (list, length) => [...nothing(Math.max(0, length - list.length)), ...list];
  return Object.fromEntries([...names].map((name) => [name, [...pad(known[name] ?? [], before), ...pad(added[name] ?? [], number)].slice(-MAX_POINTS)]));
}

const joinedAll = (known, added, before, number) => Object.fromEntries([...new Set([...Object.keys(known), ...Object.keys(added)])].map((name) => [name, joined(known[name] ?? {}, added[name] ?? {}, before, number)]));

const lengthOf = (series) => Math.max(0, ...Object.values(series).map((list) => list.length));

/** The history of the fleet and of each model, and of one worker if `worker` is set. */
export class History {
  constructor() {
    this.clear();
  }

  clear(worker = null) {
    Object.assign(this, { worker, number: null, end: 0, step: 5, length: 0, fleet: {}, models: {}, workers: {}, isAsking: false });
  }

  /** Times of the points, in Unix seconds. */
  get times() {
    return Array.from({ length: this.length }, (_, index) => this.end - (this.length - 1 - index) * this.step);
  }

  /** Request new points. Returns true if there are any. Raises `HttpProblem`. */
  async update(number, startedAt) {
    if (this.isAsking || (number !== undefined && number === this.number && startedAt === this.startedAt)) return false;
    const { worker } = this;
    // A different service numbers its points from a different start.
    const isNew = this.number === null || number < this.number || startedAt !== this.startedAt;
    const query = new URLSearchParams({ ...(isNew ? {} : { since: this.number }), ...(worker ? { worker } : {}) });
    this.isAsking = true;
    try {
      const body = await (await ask(`v1/rl/history?${query}`)).json();
      if (worker !== this.worker) return false;
      this.#add(body, isNew || body.number < this.number);
      this.startedAt = startedAt;
      return true;
    } finally {
      if (worker === this.worker) this.isAsking = false;
    }
  }

  #add(body, isNew) {
    const before = isNew ? 0 : this.length;
    const series = [body.fleet, ...Object.values(body.models), ...Object.values(body.workers)];
    const points = Math.max(0, ...series.map(lengthOf));
    for (const part of ["models", "workers"]) this[part] = joinedAll(isNew ? {} : this[part], body[part], before, points);
    this.fleet = joined(isNew ? {} : this.fleet, body.fleet, before, points);
    this.length = Math.min(MAX_POINTS, before + points);
    Object.assign(this, { number: body.number, end: body.end, step: body.step_s });
  }
}
