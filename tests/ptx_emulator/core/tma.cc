// Copies through tensor maps, and what all asynchronous operations have in common.
#include <algorithm>

#include "machine.h"
#include "numbers.h"
#include "tensormap.h"

namespace ptx {

// An asynchronous operation starts: it knows what its thread knows, and gets an agent of its own.
Machine::AsyncOp Machine::StartAsync(Context& c, int lane) {
  Cluster& cluster = *c.warp.cta->cluster;
  AsyncOp op;
  op.cluster = cluster.number;
  const uint32_t slot = cluster.next_slot++ % cluster.slot_clocks.size();
  op.agent = cluster.first_slot + slot;
  op.clock = cluster.slot_clocks[slot] + 1;
  cluster.slot_clocks[slot] += 2;
  if (options_.races) {
    op.clocks = std::make_shared<Clocks>(c.warp.lanes[lane]);
    op.clocks->Know(op.agent, op.clock + 1);
    op.thread = c.warp.agent + static_cast<uint32_t>(lane);
    Tick(c.warp);
  }
  return op;
}

// An operation that completes tells what it did, and what was known when it was issued: it came later than that.
void Machine::Signal(Mbarrier& barrier, const AsyncOp& op) {
  // What the issuing thread itself did is not among that: it has released nothing.
  Clocks& to = barrier.current;
  const uint32_t seen = to.seen[op.thread];
  std::array<uint32_t, kSpaceClasses> fenced{};
  for (size_t i = 0; i < fenced.size(); ++i) fenced[i] = to.fenced[i].empty() ? 0 : to.fenced[i][op.thread];
  Join(to, *op.clocks);
  to.seen[op.thread] = seen;
  for (size_t i = 0; i < fenced.size(); ++i) {
    if (!to.fenced[i].empty()) to.fenced[i][op.thread] = fenced[i];
  }
  to.Know(op.agent, op.clock);
}

// The mbarrier that an operation completes on, which then tells what the operation did.
Mbarrier& Machine::AsyncBarrier(const Site& site, Cluster& cluster, uint32_t address, const AsyncOp& op,
                                SharedPlace* place) {
  Mbarrier& barrier = Barrier(site, cluster, address, place);
  if (options_.races) {
    CheckBarrierUse(site, barrier, *op.clocks, true, place->offset);
    Use(site, *place->cta, AsyncActor(op, site.pc, false));
    barrier.uses[op.agent] = {op.clock, site.pc, -1};
    Signal(barrier, op);
  }
  return barrier;
}

void Machine::Complete(const Site& site, Cluster& cluster, uint32_t address, const AsyncOp& op, int64_t bytes) {
  SharedPlace place;
  Mbarrier& barrier = AsyncBarrier(site, cluster, address, op, &place);
  CompleteBytes(site, barrier, bytes, place.offset);
}

Actor Machine::AsyncActor(const AsyncOp& op, uint32_t pc, bool second, uint32_t flags) const {
  Actor actor;
  actor.access.clock = op.clock + second;
  actor.access.lanes = 1;
  actor.access.pc_flags = pc | kAsync | flags | 15u << kBytesShift;
  actor.access.base = static_cast<uint16_t>(op.agent);
  actor.access.cluster = op.cluster;
  actor.clocks = op.clocks.get();
  return actor;
}

// A map that the kernel itself writes is read by the proxy of tensor maps: fence.proxy.tensormap::generic.acquire must
// be between the writes and this.
TensorMap Machine::ReadTensorMap(Context& c, const Site& site, int lane, uint64_t address) {
  if (address % 64 != 0) Fail("misaligned", site, "a tensor map must lie at a multiple of 64 bytes");
  uint8_t bytes[64];
  Buffer* buffer = memory_.Find(address, 64);
  if (buffer == nullptr) {
    Fail(
        "out-of-bounds", site,
        Text("no tensor map at %#llx: %s", static_cast<unsigned long long>(address), memory_.Nearest(address).c_str()));
  }
  if (buffer->writable) {
    Actor actor = LaneActor(c, lane, kAsync);
    actor.fence = fence_of_[kTensorMaps];
    ReadGlobal(site, *c.warp.cta->cluster, address, 64, actor, bytes);
  } else {
    std::memcpy(bytes, reinterpret_cast<const void*>(address), 64);
  }
  const TensorMap map = DecodeTensorMap(bytes);
  if (map.rank > 5 || map.element_bytes == 0) Fail("protocol", site, "this is no tensor map");
  if (map.interleave != 0) Fail("unsupported", site, "a tensor map with interleaving");
  if (map.fills_with_nan && map.format != 10)
    Fail("unsupported", site, "a tensor map that fills with NaN other than bf16");
  if (map.atomicity > 1) Fail("unsupported", site, "a tensor map with this atomicity of its swizzle");
  if (map.address % 16 != 0) Fail("misaligned", site, "a tensor map whose address is not a multiple of 16");
  for (int i = 0; i < map.rank; ++i) {
    if (map.steps[i] != 1) Fail("unsupported", site, "a tensor map with element strides");
    if (map.box[i] > 256) Fail("protocol", site, "a box is longer than 256");
  }
  const uint64_t inner = uint64_t{map.box[0]} * map.element_bytes;
  if (inner % 16 != 0) Fail("protocol", site, "the inner extent of a box is not a multiple of 16 bytes");
  if (map.swizzle != 0 && inner > 16u << map.swizzle) {
    Fail("protocol", site,
         Text("a box of %llu bytes is wider than its swizzle", static_cast<unsigned long long>(inner)));
  }
  return map;
}

namespace {

constexpr uint16_t kFillNan = 0x7ff7;  // of bf16, measured on an H200

// Elementwise reduction of `bytes` bytes into `to`.
bool Reduce(Atomic how, int format, uint32_t bytes, uint8_t* to, const uint8_t* from) {
  const auto each = [&](auto zero, auto combine) {
    using T = decltype(zero);
    for (uint32_t at = 0; at + sizeof(T) <= bytes; at += sizeof(T)) {
      T a, b;
      std::memcpy(&a, to + at, sizeof(T));
      std::memcpy(&b, from + at, sizeof(T));
      a = combine(a, b);
      std::memcpy(to + at, &a, sizeof(T));
    }
    return true;
  };
  const auto number = [how](auto a, auto b) {
    return static_cast<decltype(a)>(how == Atomic::add ? a + b : how == Atomic::min ? std::min(a, b) : std::max(a, b));
  };
  switch (format) {
    case 2:
      return each(uint32_t{}, number);
    case 3:
      return each(int32_t{}, number);
    case 4:
      return each(uint64_t{}, number);
    case 5:
      return each(int64_t{}, number);
    case 6:
      return each(uint16_t{}, [&](uint16_t a, uint16_t b) {
        return static_cast<uint16_t>(RoundToF16(number(HalfTable()[a], HalfTable()[b])));
      });
    case 7:
    case 8:
      return each(float{}, number);
    case 10:
      return each(uint16_t{}, [&](uint16_t a, uint16_t b) {
        return static_cast<uint16_t>(RoundToBf16(
            number(BitCast<float>(static_cast<uint32_t>(a) << 16), BitCast<float>(static_cast<uint32_t>(b) << 16))));
      });
    default:
      return false;
  }
}

}  // namespace

// Copies a box between global and shared memory, row by row of its innermost dimension. Elements outside of the tensor
// become zeros in shared memory, and are left alone in global memory.
void Machine::CopyBox(const Site& site, Cta& cta, const TensorMap& map, const std::array<int32_t, 5>& coords,
                      uint32_t offset, const Actor& reader, const Actor& writer, bool load, int reduce) {
  const uint32_t row_bytes = map.box[0] * map.element_bytes;
  if (int64_t{coords[0]} * map.element_bytes / map.packed % 16 != 0) {
    Fail("misaligned", site, Text("the innermost coordinate %d is not at a multiple of 16 bytes", coords[0]));
  }
  const int64_t first = coords[0] / map.packed;
  const int64_t skip = std::clamp<int64_t>(-first, 0, map.box[0]);
  const int64_t stop = std::clamp<int64_t>(static_cast<int64_t>(map.dims[0]) - first, skip, map.box[0]);
  uint32_t rows = 1;
  for (int i = 1; i < map.rank; ++i) rows *= map.box[i];
  std::vector<uint8_t> row(row_bytes), old(row_bytes);
  for (uint32_t r = 0; r < rows; ++r) {
    bool inside = stop > skip;
    uint64_t address = map.address + static_cast<uint64_t>(first + skip) * map.element_bytes;  // modulo 2^64
    uint32_t rest = r;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t at = int64_t{coords[i]} + rest % map.box[i];
      rest /= map.box[i];
      inside = inside && at >= 0 && static_cast<uint64_t>(at) < map.dims[i];
      address += static_cast<uint64_t>(at) * map.strides[i];
    }
    const uint32_t at = offset + r * row_bytes;
    const uint32_t begin = static_cast<uint32_t>(skip) * map.element_bytes;
    uint32_t bytes = inside ? static_cast<uint32_t>(stop - skip) * map.element_bytes : 0;
    if (load) {
      std::memset(row.data(), 0, row_bytes);
      if (map.fills_with_nan) {
        for (uint32_t i = 0; i < row_bytes; i += 2) std::memcpy(row.data() + i, &kFillNan, 2);
      }
      if (bytes != 0) ReadGlobal(site, *cta.cluster, address, bytes, reader, row.data() + begin);
      for (uint32_t chunk = 0; chunk < row_bytes; chunk += 16) {
        WriteShared(site, cta, Swizzle(at + chunk, map.swizzle, map.atomicity), 16, writer, row.data() + chunk);
      }
      continue;
    }
    if (bytes == 0) continue;
    // Stores and reductions are cut off at the end of a row by 16 bytes, not by element: measured on an H200.
    bytes = (begin + bytes + 15) / 16 * 16 - begin;
    for (uint32_t chunk = begin / 16 * 16; chunk < begin + bytes; chunk += 16) {
      ReadShared(site, cta, Swizzle(at + chunk, map.swizzle, map.atomicity), 16, reader, row.data() + chunk);
    }
    if (reduce >= 0) {
      ReadGlobal(site, *cta.cluster, address, bytes, writer, old.data());
      if (!Reduce(static_cast<Atomic>(reduce), map.format, bytes, old.data(), row.data() + begin)) {
        Fail("unsupported", site, "a reduction of this format");
      }
      WriteGlobal(site, *cta.cluster, address, bytes, writer, old.data());
    } else {
      WriteGlobal(site, *cta.cluster, address, bytes, writer, row.data() + begin);
    }
  }
}

void Machine::TmaLoad(Context& c) {
  const Instr& i = c.instr;
  Cluster& cluster = *c.warp.cta->cluster;
  for (uint32_t left = c.mask; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    Site site = c.site(*this);
    site.lanes = 1u << lane;
    const TensorMap map = ReadTensorMap(c, site, lane, Value(c, 1, lane));
    if (map.rank != i.count) Fail("protocol", site, Text("the tensor map has rank %d", map.rank));
    std::array<int32_t, 5> coords{};
    for (int d = 0; d < i.count; ++d) coords[d] = static_cast<int32_t>(Value(c, 2 + d, lane));
    const uint64_t bytes = map.BoxBytes();
    const int barrier_at = 2 + i.count;
    const uint32_t to = static_cast<uint32_t>(Address(c, 0, lane));
    const SharedPlace place = Shared(site, cluster, to, bytes, 128);
    CheckWindow(c, site, place);
    SharedPlace barrier_place;
    Barrier(site, cluster, static_cast<uint32_t>(Address(c, barrier_at, lane)), &barrier_place);
    std::vector<Cta*> targets = {place.cta};
    if (i.has(k_multicast)) {
      targets.clear();
      const uint32_t mask = static_cast<uint32_t>(Value(c, barrier_at + 1, lane)) & 0xffff;
      for (uint32_t rank = 0; rank < 16; ++rank) {
        if (!(mask >> rank & 1)) continue;
        if (rank >= cluster.ctas.size()) {
          Fail("out-of-bounds", site,
               Text("multicast mask %#x names CTA %u of a cluster of %zu", mask, rank, cluster.ctas.size()));
        }
        targets.push_back(cluster.ctas[rank].get());
      }
    } else if (!i.has(k_pair) && barrier_place.cta != place.cta) {
      Fail("protocol", site, "the mbarrier is in another CTA than the destination");
    }
    uint64_t first = map.address;
    for (int d = 0; d < i.count; ++d) first += static_cast<uint64_t>(int64_t{coords[d]}) * map.strides[d];
    // A multicast is read once, for all.
    const double cycles = LoadCycles(bytes, first) / static_cast<double>(targets.size());
    for (Cta* target : targets) {
      Cta* signalled = target;
      if (i.has(k_pair)) {
        signalled = i.has(k_multicast) ? cluster.ctas[(target->rank & ~1u) | (barrier_place.cta->rank & 1u)].get()
                                       : barrier_place.cta;
      }
      const AsyncOp op = StartAsync(c, lane);
      const uint32_t pc = c.fragment.pc, barrier_offset = barrier_place.offset, offset = place.offset;
      cluster.tasks.push_back({[=, this, &cluster] {
                                 const Actor actor = AsyncActor(op, pc, false);
                                 CopyBox(site, *target, map, coords, offset, actor, actor, true, -1);
                                 Complete(site, cluster, signalled->rank << kRankShift | barrier_offset, op,
                                          static_cast<int64_t>(bytes));
                               },
                               site, LoadReady(*target, bytes, cycles)});
    }
  }
}

void Machine::TmaStore(Context& c) {
  const Instr& i = c.instr;
  Cluster& cluster = *c.warp.cta->cluster;
  // Stores of all lanes of a warp are one: the compiler merges them. Reductions are one for each lane. (H200)
  const int lane = __builtin_ctz(c.mask);
  const Site site = c.site(*this);
  const int times = i.has(k_reduce) ? __builtin_popcount(c.mask) : 1;
  for (int l = lane; l < 32; ++l) {
    if (!(c.mask >> l & 1)) continue;
    for (int d = 0; d < i.operands; ++d) {
      if (Value(c, d, l) != Value(c, d, lane)) {
        Fail("protocol", site, Text("lanes %d and %d store with different operands", lane, l));
      }
    }
  }
  const TensorMap map = ReadTensorMap(c, site, lane, Value(c, 0, lane));
  if (map.rank != i.count) Fail("protocol", site, Text("the tensor map has rank %d", map.rank));
  std::array<int32_t, 5> coords{};
  for (int d = 0; d < i.count; ++d) coords[d] = static_cast<int32_t>(Value(c, 1 + d, lane));
  const SharedPlace place =
      Shared(site, cluster, static_cast<uint32_t>(Address(c, 1 + i.count, lane)), map.BoxBytes(), 128);
  if (place.cta != c.warp.cta) Fail("protocol", site, "a store from the shared memory of another CTA");
  for (int d = 0; d < i.count; ++d) {
    if (coords[d] < 0) Fail("out-of-bounds", site, Text("a store to coordinate %d: an H200 stops at those", coords[d]));
  }
  const AsyncOp op = StartAsync(c, lane);
  auto bulk = std::make_shared<BulkOp>();
  bulk->agent = op.agent;
  bulk->pc = c.fragment.pc;
  bulk->read_clock = op.clock;
  bulk->write_clock = op.clock + 1;
  c.warp.open_group.lanes |= c.mask;
  c.warp.open_group.ops.push_back(bulk);
  const uint32_t pc = c.fragment.pc;
  const int reduce = i.has(k_reduce) ? i.variant : -1;
  Cta* cta = c.warp.cta;
  cluster.tasks.push_back({[=, this] {
                             const Actor reader = AsyncActor(op, pc, false);
                             const Actor writer = AsyncActor(op, pc, true, reduce >= 0 ? kAtomic : 0);
                             for (int t = 0; t < times; ++t) {
                               CopyBox(site, *cta, map, coords, place.offset, reader, writer, false, reduce);
                             }
                             bulk->read = bulk->done = true;
                             bulk->time = now_;
                             ++progress_;
                           },
                           site, StoreReady(*cta, map.BoxBytes())});
}

void Machine::TensorMapReplace(Context& c) {
  const Instr& i = c.instr;
  const Site site = c.site(*this);
  Cluster& cluster = *c.warp.cta->cluster;
  for (uint32_t left = c.mask; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    uint64_t address = Address(c, 0, lane);
    const Actor actor = LaneActor(c, lane);
    const Space space = Resolve(c, address);
    uint64_t w[8];
    SharedPlace place{};
    if (space == Space::shared) {
      place = Shared(site, cluster, static_cast<uint32_t>(address), 64, 128);
      ReadShared(site, *place.cta, place.offset, 64, actor, w);
    } else {
      ReadGlobal(site, cluster, address, 64, actor, w);
    }
    const uint64_t value = Value(c, 1, lane);
    const auto set = [&](int word, int at, int width, uint64_t to) {
      const uint64_t mask = ((width == 64 ? 0 : uint64_t{1} << width) - 1) << at;
      w[word] = (w[word] & ~mask) | (to << at & mask);
    };
    const int ord = i.extra;
    switch (static_cast<MapField>(i.variant)) {
      case MapField::global_address:
        w[0] = value;
        break;
      case MapField::global_dim: {
        constexpr int kWord[5] = {4, 4, 5, 5, 6}, kAt[5] = {0, 32, 0, 32, 0};
        set(kWord[ord], kAt[ord], 32, value - 1);
        break;
      }
      case MapField::global_stride: {
        if (value % 16 != 0) Fail("misaligned", site, "a stride that is not a multiple of 16");
        constexpr int kWord[4] = {1, 2, 2, 3}, kAt[4] = {32, 0, 32, 0};
        set(kWord[ord], kAt[ord], 32, value >> 4);
        set(3, 32 + 4 * ord, 4, value >> 36);
        break;
      }
      case MapField::box_dim: {
        constexpr int kWord[5] = {6, 7, 7, 7, 7}, kAt[5] = {56, 0, 8, 16, 24};
        set(kWord[ord], kAt[ord], 8, value - 1);
        break;
      }
      default:
        Fail("unsupported", site, "this field of a tensor map");
    }
    if (space == Space::shared) {
      WriteShared(site, *place.cta, place.offset, 64, actor, w);
    } else {
      WriteGlobal(site, cluster, address, 64, actor, w);
    }
  }
}

}  // namespace ptx
