"use strict";
// An experiment changes one thing and repeats the same conversation. `way(name)` gives the changed
// computation; the other side uses a plain cache. The package has the same changes: the faults of
// nanokv.faults and the caches of nanokv.make_cache.

const POSITIONS = {
  // start_pos_off_by_one
  oneTooFar: { ...RIGHT, position: (start, t) => start + t + (start > 0 ? 1 : 0) },
  restarts: { ...RIGHT, position: (start, t) => t }, // start_pos_restarts
};
const MULTIPLIED = { ...RIGHT, attend: attendMultiplied };

const plain = (model, kind = "dict", how = RIGHT) => new Lane(model, makeCache(kind, model), how);

const WAYS = {
  // name → a lane that computes this way; `before` is the lane of the previous chat
  right: (model) => plain(model),
  off: (model) => new ForgetfulLane(model, makeCache("dict", model)),
  oneTooFar: (model) => plain(model, "dict", POSITIONS.oneTooFar),
  restarts: (model) => plain(model, "dict", POSITIONS.restarts),
  multiplied: (model) => plain(model, "dict", MULTIPLIED),
  notCleared: (model, before) => new Lane(model, notCleared(before.cache, model)),
};
const way = (name) => WAYS[name] ?? ((model) => plain(model, name)); // or a kind of cache
