// Atomic operations, and the order that accesses to one place make: releases and acquires, of threads and of fences.
#include <algorithm>

#include "lanes.h"
#include "machine.h"

namespace ptx {

// Lanes store to an address. What a release knows, or what a fence before a relaxed store knew, can be had from there.
// Another store puts an end to that, a read and write does not.
void Machine::Publish(Context& c, uint32_t lanes, uint64_t address, bool keeps) {
  std::unordered_map<uint64_t, Clocks>& published = c.warp.cta->cluster->published;
  if (!options_.races || (!c.instr.has(k_strong) && published.empty())) return;
  const uint64_t place = PlaceOf(c, address);
  const std::vector<Clocks>& from = c.instr.has(k_release) ? c.warp.lanes : c.warp.fences;
  if (!keeps || !c.instr.has(k_strong)) published.erase(place);
  const Cluster& cluster = *c.warp.cta->cluster;
  if (!c.instr.has(k_strong) || (from.empty() && cluster.ctas.size() == 1)) return;
  Clocks& to = published[place];
  if (to.seen.empty()) to.Resize(cluster.agents, fences_);
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    TellBegun(cluster, c.warp.lanes[static_cast<size_t>(__builtin_ctz(left))], to);
  }
  if (from.empty()) return;
  for (uint32_t left = lanes; left != 0; left &= left - 1) Join(to, from[static_cast<size_t>(__builtin_ctz(left))]);
}

// A lane loads from an address. An acquire knows at once, a relaxed load when a fence follows.
void Machine::Observe(Context& c, int lane, uint64_t address) {
  if (!options_.races) return;
  Cluster& cluster = *c.warp.cta->cluster;
  const auto found = cluster.published.find(PlaceOf(c, address));
  if (found == cluster.published.end()) return;
  if (c.instr.has(k_acquire)) return Join(c.warp.lanes[lane], found->second);
  TellBegun(cluster, found->second, c.warp.lanes[lane]);
  if (c.warp.pending.empty()) {
    c.warp.pending.resize(32);
    for (Clocks& clocks : c.warp.pending) clocks.Resize(cluster.agents, fences_);
  }
  Join(c.warp.pending[lane], found->second);
}

// One number for an address of shared or global memory. Shared addresses of a CTA's own may lack its rank.
uint64_t Machine::PlaceOf(const Context& c, uint64_t address) const {
  const Space space = Resolve(c, address);
  return space == Space::shared ? address & 0xffffffff : address;
}

namespace {

// In global memory, sums of float32 take denormal numbers for zeros (PTX ISA, atom).
float AddFloats(float x, float y, bool flushes) {
  if (!flushes) return Canonical(x + y);
  return Flush(Canonical(Flush(x) + Flush(y)));
}

uint64_t Combine(const Instr& i, bool global, uint64_t old, uint64_t a, uint64_t b) {
  const int bits = i.bits;
  const auto extend = [bits](uint64_t v) { return static_cast<int64_t>(v << (64 - bits)) >> (64 - bits); };
  switch (static_cast<Atomic>(i.variant)) {
    case Atomic::add:
      if (i.kind == 'f' && bits == 64) return BitCast<uint64_t>(BitCast<double>(old) + BitCast<double>(a));
      if (i.kind == 'f') {
        const float x = BitCast<float>(static_cast<uint32_t>(old)), y = BitCast<float>(static_cast<uint32_t>(a));
        return BitCast<uint32_t>(AddFloats(x, y, global));
      }
      return old + a;
    case Atomic::min:
      return i.kind == 's' ? (extend(old) < extend(a) ? old : a) : std::min(old, a);
    case Atomic::max:
      return i.kind == 's' ? (extend(old) > extend(a) ? old : a) : std::max(old, a);
    case Atomic::and_:
      return old & a;
    case Atomic::or_:
      return old | a;
    case Atomic::xor_:
      return old ^ a;
    case Atomic::exch:
      return a;
    case Atomic::cas:
      return old == a ? b : old;
    case Atomic::inc:
      return old >= a ? 0 : old + 1;
    case Atomic::dec:
      return old == 0 || old > a ? a : old - 1;
  }
  return old;
}

}  // namespace

void Machine::AtomicOp(Context& c) {
  const Instr& i = c.instr;
  const uint32_t bytes = static_cast<uint32_t>(i.bits / 8);
  const Site site = c.site(*this);
  Cluster& cluster = *c.warp.cta->cluster;
  for (int l = 0; l < 32; ++l) {
    if (!(c.mask >> l & 1)) continue;
    uint64_t address = Address(c, 1, l);
    const Space space = Resolve(c, address);
    const Actor actor = LaneActor(c, l, kAtomic);
    uint64_t old = 0;
    Observe(c, l, address);
    Publish(c, 1u << l, address, true);
    const uint64_t a = Value(c, 2, l), b = i.operands > 3 ? Value(c, 3, l) : 0;
    if (space == Space::shared) {
      const SharedPlace place = Shared(site, cluster, static_cast<uint32_t>(address), bytes, bytes);
      CheckWindow(c, site, place);
      ReadShared(site, *place.cta, place.offset, bytes, actor, &old);
      const uint64_t value = Combine(i, space != Space::shared, old, a, b);
      WriteShared(site, *place.cta, place.offset, bytes, actor, &value);
    } else {
      if (address % bytes != 0) Fail("misaligned", site, Text("address is not a multiple of %u", bytes));
      ReadGlobal(site, cluster, address, bytes, actor, &old);
      const uint64_t value = Combine(i, space != Space::shared, old, a, b);
      WriteGlobal(site, cluster, address, bytes, actor, &value);
    }
    Put(c, 0, l, old);
  }
  if (i.has(k_release)) Tick(c.warp);
}

}  // namespace ptx
