"use strict";
// The layout of the timeline, in ms and lanes: plain values, computed before anything is drawn.

const MOST_LANES = 24;

// Each stretch with its depth (the number of stretches around it) and its own time (without stretches inside it). A
// stretch that ends after the one it began in is beside it, not inside.
function nested(slices) {
  const open = [];
  return [...slices].sort((one, other) => one[1] - other[1] || other[2] - one[2]).map(([label, start, end, bucket]) => {
    while (open.length && open.at(-1).end <= start + 1e-6) open.pop();
    if (open.length) open.at(-1).own -= Math.min(end, open.at(-1).end) - start;
    const one = { label, start, end, bucket, depth: open.length, own: end - start };
    open.push(one);
    return one;
  });
}

// Put buckets that are in flight at the same time into different lanes. Returns the number of lanes.
function pack(trips) {
  const free = [];
  for (const trip of trips) {
    let lane = free.findIndex((until) => until <= trip.start);
    if (lane < 0) lane = free.length < MOST_LANES ? free.length : free.indexOf(Math.min(...free));
    free[lane] = trip.end;
    trip.lane = lane;
  }
  return free.length;
}

// The trip of one bucket on one rank. After its launch it waits until the last rank has launched it (`last`), then its
// bytes are sent. `exposed` is the part of that time not hidden under backward.
function tripOf(bucket, rank, backward) {
  const launches = bucket.launched.map((at) => at ?? 0), latest = Math.max(...launches);
  const start = bucket.launched[rank], end = Math.max(start, bucket.finished[rank] ?? latest);
  const hidden = backward.reduce(
    (sum, back) => sum + Math.max(0, Math.min(end, back.end) - Math.max(start, back.start)), 0);
  return { bucket: bucket.bucket, nbytes: bucket.nbytes, start, end, known: bucket.finished[rank] !== null,
    last: Math.min(Math.max(latest, start), end), slowest: launches.indexOf(latest), exposed: end - start - hidden };
}

function rankRows(step, rank) {
  const slices = nested(step.slices[rank]), backward = slices.filter((one) => one.label === "backward");
  const trips = step.buckets.filter((one) => one.launched[rank] !== null).map((one) => tripOf(one, rank, backward))
    .sort((one, other) => one.start - other.start);
  const depths = Math.max(1, ...slices.map((one) => one.depth + 1));
  return { rank, slices, backward, trips, depths, lanes: pack(trips), late: lateParts(slices, trips) };
}

// The bubbles: stretches in which the rank waits for a bucket that another rank has not launched yet.
function lateParts(slices, trips) {
  const launched = new Map(trips.map((trip) => [trip.bucket, trip.last]));
  return slices.filter((one) => one.label === "bucket wait" && launched.get(one.bucket) > one.start)
    .map((one) => ({ start: one.start, end: Math.min(one.end, launched.get(one.bucket)) }));
}

// Cut a stretch into pieces inside and outside of backward: [start, end, hidden].
function cut(start, end, backward) {
  const pieces = [];
  let at = start;
  for (const back of [...backward, { start: Infinity, end: Infinity }]) {
    const from = Math.min(end, Math.max(at, back.start)), to = Math.min(end, Math.max(from, back.end));
    if (from > at) pieces.push([at, from, false]);
    if (to > from) pieces.push([from, to, true]);
    at = Math.max(at, to);
  }
  return pieces;
}
