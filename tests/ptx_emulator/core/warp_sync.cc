// What the lanes of a warp do together: shuffles, votes, elections, and who takes part.
#include "lanes.h"
#include "machine.h"

namespace ptx {

// Whether all lanes of `members` that are alive are here. Where some are elsewhere, this group waits for them.
bool Machine::Converged(Context& c, uint32_t members) {
  const uint32_t needed = members & c.warp.live;
  if ((needed & ~c.mask) == 0) return true;
  if ((needed & ~c.fragment.mask) == 0) {
    Fail("protocol", c.site(*this), Text("lanes %#010x do not take part: their guard is false", needed & ~c.mask));
  }
  c.fragment.wait = {Wait::kLanes, c.warp.cta, needed, 0};
  return false;
}

// Whether the lanes that the member mask of an instruction names are here. A lane's mask must name itself, and all
// lanes that it names must have the same one.
bool Machine::MembersMeet(Context& c, int operand) {
  const uint32_t* masks = Source<uint32_t>(c, operand);
  uint32_t members = 0;
  for (uint32_t left = c.mask; left != 0; left &= left - 1) {
    const int l = __builtin_ctz(left);
    members |= masks[l];
    if (masks[l] == masks[__builtin_ctz(c.mask)] && (c.mask & ~masks[l]) == 0) break;  // of all: the usual case
    if (!(masks[l] >> l & 1)) {
      Fail("protocol", c.site(*this), Text("lane %d is not in its member mask %#010x", l, masks[l]));
    }
    for (uint32_t others = masks[l] & c.mask; others != 0; others &= others - 1) {
      const int other = __builtin_ctz(others);
      if (masks[other] == masks[l]) continue;
      Fail("protocol", c.site(*this),
           Text("lane %d has the member mask %#010x, lane %d in it has %#010x", l, masks[l], other, masks[other]));
    }
  }
  return Converged(c, members);
}

void Machine::VoteAll(Context& c) {
  const Instr& i = c.instr;
  const uint32_t predicate = *Source<uint32_t>(c, 1);
  const uint32_t* masks = Source<uint32_t>(c, 2);
  uint32_t results[32];
  for (int l = 0; l < 32; ++l) {
    const uint32_t all = c.mask & masks[l];
    const uint32_t true_lanes = (i.extra ? ~predicate : predicate) & all;
    switch (static_cast<Vote>(i.variant)) {
      case Vote::ballot:
        results[l] = true_lanes;
        break;
      case Vote::any:
        results[l] = true_lanes != 0;
        break;
      case Vote::all:
        results[l] = true_lanes == all;
        break;
      case Vote::uni:
        results[l] = true_lanes == 0 || true_lanes == all;
        break;
    }
  }
  for (int l = 0; l < 32; ++l) {
    if (c.mask >> l & 1) Put(c, 0, l, results[l]);
  }
}

void Machine::Elect(Context& c) {
  uint32_t leaders[32];
  for (int l = 0; l < 32; ++l) {
    const uint32_t members = Source<uint32_t>(c, 2)[l] & c.mask;
    leaders[l] = members == 0 ? 0 : static_cast<uint32_t>(__builtin_ctz(members));
  }
  for (int l = 0; l < 32; ++l) {
    if (!(c.mask >> l & 1)) continue;
    Put(c, 0, l, leaders[l]);
    Put(c, 1, l, leaders[l] == static_cast<uint32_t>(l));
  }
}

// Every member knows what any of them knew.
void Machine::SyncWarp(Context& c) {
  if (!options_.races) return;
  const uint32_t* masks = Source<uint32_t>(c, 0);
  for (uint32_t left = c.mask; left != 0;) {
    const int first = __builtin_ctz(left);
    const uint32_t members = c.mask & masks[first];
    left &= ~members;
    Clocks all = c.warp.lanes[first];
    for (int l = 0; l < 32; ++l) {
      if (members >> l & 1) Join(all, c.warp.lanes[l]);
    }
    for (int l = 0; l < 32; ++l) {
      if (members >> l & 1) c.warp.lanes[l] = all;
    }
  }
  Tick(c.warp);
}

void Machine::Shuffle(Context& c) {
  const Instr& i = c.instr;
  const uint32_t* value = Source<uint32_t>(c, 2);
  const uint32_t* by = Source<uint32_t>(c, 3);
  const uint32_t* members = Source<uint32_t>(c, 5);
  const uint32_t* limits = Source<uint32_t>(c, 4);
  uint32_t r[32], in_range = 0;
  for (int l = 0; l < 32; ++l) {
    r[l] = 0;
    if (!(c.mask >> l & 1)) continue;
    const int segment = static_cast<int>(limits[l] >> 8 & 31), clamp = static_cast<int>(limits[l] & 31);
    const int highest = (l & segment) | (clamp & ~segment), lowest = l & segment;
    const int b = static_cast<int>(by[l] & 31);
    int source = l;
    bool ok = true;
    switch (static_cast<ptx::Shuffle>(i.variant)) {
      case ptx::Shuffle::idx:
        source = lowest | (b & ~segment);
        ok = source <= highest;
        break;
      case ptx::Shuffle::up:
        source = l - b;
        ok = source >= highest;
        break;
      case ptx::Shuffle::down:
        source = l + b;
        ok = source <= highest;
        break;
      case ptx::Shuffle::bfly:
        source = l ^ b;
        ok = source <= highest;
        break;
    }
    if (!ok) source = l;
    if (!(c.mask & members[l] & 1u << source)) {
      Fail("protocol", c.site(*this), Text("lane %d takes a value from lane %d, which is not here", l, source));
    }
    r[l] = value[source];
    in_range |= static_cast<uint32_t>(ok) << l;
  }
  if (c.operands[0].kind != kSink) Blend(Destination<uint32_t>(c, 0), r, c.mask);
  if (c.operands[1].kind != kSink) {
    uint32_t& d = *Destination<uint32_t>(c, 1);
    d = (d & ~c.mask) | (in_range & c.mask);
  }
}

}  // namespace ptx
