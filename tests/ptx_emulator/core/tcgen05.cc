// The tensor core of Blackwell: products and copies issued by one thread, completion through mbarriers.
#include <algorithm>

#include "machine.h"
#include "numbers.h"
#include "products.h"
#include "tmem.h"

namespace ptx {
namespace {

struct InstructionDescriptor {
  uint32_t bits;
  uint32_t Field(int at, int width) const { return bits >> at & ((1u << width) - 1); }
  int m() const { return static_cast<int>(Field(24, 5)) * 16; }
  int n() const { return static_cast<int>(Field(17, 6)) * 8; }
};

}  // namespace

void Machine::EnqueueTensor(Cluster& cluster, Cta& cta, Task task) {
  if (options_.timeline && task.ready == 0) task.ready = std::max(now_, cta.timeline->tensor_cores[0]);
  cluster.queues[cta.rank].push_back(std::move(task));
}

// The next operation of the tensor core of this lane's CTA; it knows what the lane knows.
Machine::AsyncOp Machine::StartTensor(Context& c, int lane) {
  Cta& cta = *c.warp.cta;
  AsyncOp op;
  op.cluster = cta.cluster->number;
  op.agent = cta.tensor_agent;
  op.clock = ++cta.tensor_clock;
  if (options_.races) {
    op.clocks = std::make_shared<Clocks>(c.warp.lanes[lane]);
    op.clocks->Know(op.agent, op.clock);
    Tick(c.warp);
  }
  return op;
}

void Machine::TcCp(Context& c) {
  const Site site = c.site(*this);
  if (c.mask & (c.mask - 1)) Fail("protocol", site, "several lanes issue tcgen05.cp");
  const int lane = __builtin_ctz(c.mask);
  Cta& cta = *c.warp.cta;
  const bool pair = c.instr.has(k_pair);
  TmemOf(site, cta, pair ? 2 : 1);
  const std::vector<Cta*> targets = Pair(site, cta, pair);
  const uint32_t address = static_cast<uint32_t>(Address(c, 0, lane));
  const uint64_t descriptor = Value(c, 1, lane);
  const AsyncOp op = StartTensor(c, lane);
  const uint32_t pc = c.fragment.pc;
  EnqueueTensor(*cta.cluster, cta,
                {[=, this] {
                   const Actor actor = AsyncActor(op, pc, false);
                   const uint32_t start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
                   const uint32_t stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
                   if (descriptor >> 61 != 0) {
                     Fail("unsupported", site, "tcgen05.cp from swizzled shared memory");
                   }
                   for (Cta* target : targets) {
                     Tmem& tmem = TmemOf(site, *target, 0);
                     const uint32_t column = ColumnOf(address);
                     TouchTmem(site, *target, 0, kTmemLanes, column, 4, actor, true);
                     for (uint32_t row = 0; row < 32; ++row) {
                       uint32_t words[4];
                       const SharedPlace place =
                           Shared(site, *target->cluster,
                                  target->rank << kRankShift | (start + row % 8 * 16 + row / 8 * stride), 16, 16);
                       ReadShared(site, *place.cta, place.offset, 16, actor, words);
                       for (uint32_t lane_at = row; lane_at < kTmemLanes; lane_at += 32) {
                         const size_t at = lane_at * kTmemColumns + column;
                         std::memcpy(&tmem.words[at], words, 16);
                         std::memset(&tmem.written[at], 1, 4);
                       }
                     }
                   }
                   ++progress_;
                 },
                 site, 0});
}

// Multiplies [k][row] values by their scale factors, bytes of TMEM: those of row r are in lane r % 32 of column r / 32,
// from byte `id` on.
void Machine::ApplyScales(const Site& site, Cta& cta, const Actor& actor, ScaleFormat format, uint32_t address,
                          uint32_t id, std::vector<float>& values, int rows, int k) {
  const Tmem& tmem = TmemOf(site, cta, 0);
  const uint32_t column = ColumnOf(address), columns = static_cast<uint32_t>(rows + 31) / 32;
  TouchTmem(site, cta, 0, 32, column, columns, actor, false);
  for (int row = 0; row < rows; ++row) {
    const size_t at = static_cast<size_t>(row % 32) * kTmemColumns + column + static_cast<size_t>(row / 32);
    if (!tmem.written[at])
      Fail("uninitialised", site, Text("the scale factor of row %d in TMEM was never written", row));
    for (int depth = 0; depth < k; ++depth) {
      const uint32_t byte = tmem.words[at] >> (8 * (id + static_cast<uint32_t>(depth / format.block)) % 32) & 255;
      const float scale =
          format.exponent_only ? std::ldexp(1.0f, static_cast<int>(byte) - 127) : ByteTable(true)[byte & 127];
      values[static_cast<size_t>(depth) * static_cast<size_t>(rows) + static_cast<size_t>(row)] *= scale;
    }
  }
}

void Machine::TcMma(Context& c) {
  const Instr& i = c.instr;
  const Site site = c.site(*this);
  if (c.mask & (c.mask - 1)) Fail("protocol", site, "several lanes issue tcgen05.mma");
  const int lane = __builtin_ctz(c.mask);
  Cta& cta = *c.warp.cta;
  const bool pair = i.has(k_pair);
  TmemOf(site, cta, pair ? 2 : 1);
  const std::vector<Cta*> targets = Pair(site, cta, pair);
  if (pair && cta.rank % 2 != 0) Fail("protocol", site, "the odd CTA of a pair issues tcgen05.mma");
  const uint32_t d = static_cast<uint32_t>(Address(c, 0, lane));
  const uint64_t a = i.has(k_a_in_tmem) ? Address(c, 1, lane) : Value(c, 1, lane), b = Value(c, 2, lane);
  const InstructionDescriptor description{static_cast<uint32_t>(Value(c, 3, lane))};
  const bool accumulates = *Source<uint32_t>(c, 4) >> lane & 1;
  const MmaKind kind = static_cast<MmaKind>(i.variant);
  if (i.has(k_a_in_tmem)) Fail("unsupported", site, "A in TMEM");
  const int block = i.extra;  // elements that share a scale factor, or 0
  for (int j = 0; block == 0 && j < i.count && 5 + j < i.operands; ++j) {
    if (Value(c, 5 + j, lane) != 0) Fail("unsupported", site, "lanes of the result are left out");
  }
  const auto format = [&](uint32_t code) {
    switch (kind) {
      case MmaKind::f16:
        if (code <= 1) return code == 1 ? Format::bf16 : Format::f16;
        break;
      case MmaKind::tf32:
        if (code == 2) return Format::tf32;
        break;
      case MmaKind::f8f6f4:
        if (code <= 1) return code == 0 ? Format::e4m3 : Format::e5m2;
        break;
      case MmaKind::i8:
        if (code <= 1) return code == 0 ? Format::u8 : Format::s8;
        break;
      case MmaKind::mxf8f6f4:
        if (code <= 1) return code == 0 ? Format::e4m3 : Format::e5m2;
        break;
      case MmaKind::mxf4:
      case MmaKind::mxf4nvf4:
        if (code == 1) return Format::e2m1;
        break;
    }
    Fail("unsupported", site, Text("operands of format %u", code));
  };
  const Format a_format = format(description.Field(7, 3)), b_format = format(description.Field(10, 3));
  const int parts = static_cast<int>(targets.size()), m = description.m(), n = description.n(), own_m = m / parts;
  const bool shape_ok = pair ? (m == 128 || m == 256) : (m == 64 || m == 128);
  const int n_step = m / parts == 64 && !pair ? 8 : pair ? 32 : 16;
  if (!shape_ok || n < n_step || n > 256 || n % (n_step == 32 ? 16 : n_step) != 0) {
    Fail("protocol", site, Text("a product of %d x %d", m, n));
  }
  if (description.Field(2, 1) != 0) Fail("unsupported", site, "sparse products");
  const uint32_t result = block == 0 ? description.Field(4, 2) : 1;
  const uint32_t a_scales = block == 0 ? 0 : static_cast<uint32_t>(Address(c, 5, lane));
  const uint32_t b_scales = block == 0 ? 0 : static_cast<uint32_t>(Address(c, 6, lane));
  if (block != 0 && (own_m != 128 || description.Field(15, 2) != 0 || description.Field(31, 1) != 0)) {
    Fail("unsupported", site, "block scales with this shape or layout");
  }
  if ((kind == MmaKind::i8) != (result == 2) || result > 2) Fail("protocol", site, "no such format of the result");
  const AsyncOp op = StartTensor(c, lane);
  double ready = 0;
  if (options_.timeline) {
    const double products = double{1} * own_m * n * (32 / BytesOf(a_format)) * BytesOf(a_format) / 2;
    for (Cta* target : targets) ready = TensorReady(*target, 0, products, costs.tcgen05_products, now_);
  }
  const uint32_t pc = c.fragment.pc;
  EnqueueTensor(
      *cta.cluster, cta,
      {[=, this] {
         const Actor actor = AsyncActor(op, pc, false);
         const int k = 2 * PerChunk(a_format);
         const int b_rows = n / parts;
         std::vector<float> whole_b(static_cast<size_t>(k) * n);
         Tile tile;
         for (int v = 0; v < parts; ++v) {
           LoadTile(site, *targets[v], {b, b_rows, k, b_format, block == 0 && description.Field(16, 1) != 0}, actor,
                    tile);
           for (int depth = 0; depth < k; ++depth) {
             std::copy_n(tile.values.begin() + depth * b_rows, b_rows, whole_b.begin() + depth * n + v * b_rows);
           }
         }
         const bool one_byte_exponent = description.Field(23, 1) != 0;
         const bool negative = description.Field(13, 1) != description.Field(14, 1);
         for (int v = 0; v < parts; ++v) {
           Cta& target = *targets[v];
           Tmem& tmem = TmemOf(site, target, 0);
           LoadTile(site, target, {a, own_m, k, a_format, block == 0 && description.Field(15, 1) != 0}, actor, tile);
           std::vector<float> scaled_b = whole_b;
           if (block != 0) {
             const ScaleFormat scales{block, one_byte_exponent};
             ApplyScales(site, target, actor, scales, a_scales, description.Field(29, 2), tile.values, own_m, k);
             ApplyScales(site, target, actor, scales, b_scales, description.Field(4, 2), scaled_b, n, k);
           }
           std::vector<float> sums(static_cast<size_t>(own_m) * n, 0.0f);
           MultiplyAdd(tile.values.data(), own_m, scaled_b.data(), n, k, own_m, n, sums.data());
           // Where the rows and columns of the result lie.
           const bool halves = pair && own_m == 64, scattered = !pair && own_m == 64;
           const uint32_t columns = static_cast<uint32_t>(halves ? n / 2 : n), column = ColumnOf(d);
           const uint32_t base_lane = LaneOf(d);
           if (scattered ? base_lane != 0 && base_lane != 16 : base_lane != 0) {
             Fail("protocol", site, Text("a result that begins at lane %u", base_lane));
           }
           if (scattered) {
             for (uint32_t slab = 0; slab < 4; ++slab) {
               if (accumulates) TouchTmem(site, target, 32 * slab + base_lane, 16, column, columns, actor, false);
               TouchTmem(site, target, 32 * slab + base_lane, 16, column, columns, actor, true);
             }
           } else {
             if (accumulates) TouchTmem(site, target, 0, kTmemLanes, column, columns, actor, false);
             TouchTmem(site, target, 0, kTmemLanes, column, columns, actor, true);
           }
           for (int row = 0; row < own_m; ++row) {
             for (int half = 0; half < (halves ? 2 : 1); ++half) {
               const uint32_t at_lane = scattered ? static_cast<uint32_t>(row % 16 + 32 * (row / 16)) + base_lane
                                                  : static_cast<uint32_t>(row + 64 * half);
               const size_t at = at_lane * kTmemColumns + column;
               const float* from = sums.data() + static_cast<size_t>(row) * n + half * columns;
               uint32_t* to = tmem.words.data() + at;
               if (accumulates && std::memchr(tmem.written.data() + at, 0, columns) != nullptr) {
                 Fail("uninitialised", site,
                      Text("the result is added to lane %u of TMEM, which nothing wrote", at_lane));
               }
               for (uint32_t j = 0; j < columns; ++j) {
                 const float sum = negative ? -from[j] : from[j];
                 if (result == 1) {
                   to[j] = BitCast<uint32_t>((accumulates ? BitCast<float>(to[j]) : 0.0f) + sum);
                 } else if (result == 0) {
                   to[j] = RoundToF16((accumulates ? HalfTable()[to[j] & 0xffff] : 0.0f) + sum);
                 } else {
                   to[j] = (accumulates ? to[j] : 0u) + static_cast<uint32_t>(static_cast<int32_t>(sum));
                 }
               }
               std::memset(tmem.written.data() + at, 1, columns);
             }
           }
         }
         ++progress_;
       },
       site, ready});
}

void Machine::TcCommit(Context& c) {
  const Site site = c.site(*this);
  if (c.mask & (c.mask - 1)) Fail("protocol", site, "several lanes issue tcgen05.commit");
  const int lane = __builtin_ctz(c.mask);
  Cta& cta = *c.warp.cta;
  Cluster& cluster = *cta.cluster;
  TmemOf(site, cta, c.instr.has(k_pair) ? 2 : 1);
  SharedPlace place;
  Barrier(site, cluster, static_cast<uint32_t>(Address(c, 0, lane)), &place);
  std::vector<Cta*> targets = {place.cta};
  if (c.instr.has(k_multicast)) {
    targets.clear();
    const uint32_t mask = static_cast<uint32_t>(Value(c, 1, lane)) & 0xffff;
    for (uint32_t rank = 0; rank < 16; ++rank) {
      if (!(mask >> rank & 1)) continue;
      if (rank >= cluster.ctas.size())
        Fail("out-of-bounds", site, Text("mask %#x in a cluster of %zu", mask, cluster.ctas.size()));
      targets.push_back(cluster.ctas[rank].get());
    }
  }
  AsyncOp op;
  op.agent = cta.tensor_agent;
  op.clock = cta.tensor_clock;
  op.thread = c.warp.agent + static_cast<uint32_t>(lane);
  if (options_.races) op.clocks = std::make_shared<Clocks>(c.warp.lanes[lane]);
  EnqueueTensor(cluster, cta,
                {[=, this, &cluster] {
                   for (Cta* target : targets) {
                     SharedPlace found;
                     const uint32_t address = target->rank << kRankShift | place.offset;
                     Mbarrier& barrier = AsyncBarrier(site, cluster, address, op, &found);
                     Arrive(site, barrier, 1, found.offset);
                   }
                 },
                 site, 0});
}

}  // namespace ptx
