"use strict";
// One thing is changed and the same conversation is held again. `way` says how the changed side
// computes; the right side is a plain cache. The package has the same: faults of nanokv.faults,
// caches of nanokv.make_cache.

const POSITIONS = {
  // start_pos_off_by_one
  oneTooFar: { ...RIGHT, position: (start, t) => start + t + (start > 0 ? 1 : 0) },
  restarts: { ...RIGHT, position: (start, t) => t }, // start_pos_restarts
};
const MULTIPLIED = { ...RIGHT, attend: attendMultiplied };

const plain = (model, kind = "dict", how = RIGHT) => new Lane(model, makeCache(kind, model), how);

const WAYS = {
  // name → a lane that computes so; `before` is the lane of the chat before
  right: (model) => plain(model),
  off: (model) => new ForgetfulLane(model, makeCache("dict", model)),
  oneTooFar: (model) => plain(model, "dict", POSITIONS.oneTooFar),
  restarts: (model) => plain(model, "dict", POSITIONS.restarts),
  multiplied: (model) => plain(model, "dict", MULTIPLIED),
  notCleared: (model, before) => new Lane(model, notCleared(before.cache, model)),
};
const way = (name) => WAYS[name] ?? ((model) => plain(model, name)); // or a kind of cache
