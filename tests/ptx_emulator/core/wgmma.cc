// Products of Hopper's warpgroups. Each warp of a warpgroup multiplies its 16 rows of A; the four share B.
#include <algorithm>

#include "machine.h"
#include "numbers.h"
#include "products.h"

namespace ptx {

void Machine::CheckAccumulators(Context& c) {
  Warp& warp = c.warp;
  // A compiler may put the zeros of a new tile behind the fence: only what reads or computes counts.
  if (c.instr.op() != Op::mov) {
    warp.touched.resize(static_cast<size_t>(program_.register_bytes) / 32);
    for (int o = 0; o < c.instr.operands; ++o) {
      if (c.operands[o].kind == kRegister) warp.touched[static_cast<size_t>(c.operands[o].place) / 32] = 1;
    }
  }
  for (const Warp::InFlight& product : warp.in_flight) {
    const Instr& mma = program_.instructions[product.pc];
    const Operand* accumulators = program_.operands.data() + mma.first;
    for (int j = 0; j < mma.count / 2; ++j) {
      for (int o = 0; o < c.instr.operands; ++o) {
        if (c.operands[o].kind != kRegister || c.operands[o].place != accumulators[j].place) continue;
        // The machine code waits for what it uses: the compiler knows of this dependence, and its front end moves
        // conversions before the wait. It must come, though.
        while (warp.executed <= product.serial) WgmmaExecute(warp);
        if (!warp.early) {
          warp.early = true;
          warp.early_site = c.site(*this);
          warp.early_line = mma.line;
        }
        return;
      }
    }
  }
}

void Machine::WgmmaIssue(Context& c) {
  Warp& warp = c.warp;
  const Instr& i = c.instr;
  const Site site = c.site(*this);
  Cta& cta = *warp.cta;
  if (warp.early) {
    Fail("protocol", warp.early_site,
         Text("an accumulator of the wgmma of line %d is used, and no wgmma.wait_group follows before the next product",
              warp.early_line));
  }
  bool fence_needed = warp.fence_needed;
  for (int j = 0; j < i.count / 2 && !warp.touched.empty(); ++j) {
    fence_needed = fence_needed || warp.touched[static_cast<size_t>(c.operands[j].place) / 32];
  }
  if (fence_needed) {
    Fail("protocol", site, "no wgmma.fence since the accumulators were last used by other instructions");
  }
  const size_t group = static_cast<size_t>(warp.id) / 4;
  if (cta.warpgroups.size() <= group) cta.warpgroups.resize(group + 1);
  const int lane = __builtin_ctz(c.mask), at = i.count / 2;
  WgmmaOp op;
  op.pc = c.fragment.pc;
  op.a = Value(c, at, lane);
  op.b = Value(c, at + 1, lane);
  const uint32_t accumulates = *Source<uint32_t>(c, at + 2);
  op.accumulate = accumulates >> lane & 1;
  op.serial = warp.issued++;
  for (int l = 0; l < 32; ++l) {
    if (Value(c, at, l) != op.a || Value(c, at + 1, l) != op.b || (accumulates >> l & 1) != op.accumulate) {
      Fail("protocol", site, Text("lanes %d and %d have different descriptors or scale-d", lane, l));
    }
  }
  SharedTile& shared = cta.warpgroups[group].tiles[op.serial];
  if (shared.users++ == 0) {
    shared.pc = op.pc;
    shared.a = op.a;
    shared.b = op.b;
  } else if (shared.pc != op.pc || shared.a != op.a || shared.b != op.b) {
    Fail("protocol", site,
         Text("the warps of a warpgroup do not issue the same products: line %d, descriptors %#llx %#llx elsewhere, "
              "%#llx %#llx here",
              program_.instructions[shared.pc].line, static_cast<unsigned long long>(shared.a),
              static_cast<unsigned long long>(shared.b), static_cast<unsigned long long>(op.a),
              static_cast<unsigned long long>(op.b)));
  }
  if (options_.races) {
    op.clocks = std::make_shared<Clocks>(warp.lanes[lane]);
    Tick(warp);
  }
  const auto same = std::find_if(warp.in_flight.begin(), warp.in_flight.end(), [&](const Warp::InFlight& other) {
    return program_.operands[program_.instructions[other.pc].first].place == c.operands[0].place;
  });
  if (same == warp.in_flight.end()) {
    warp.in_flight.push_back({op.serial, op.pc});
  } else {
    *same = {op.serial, op.pc};
  }
  if (options_.timeline) {
    // A quarter of the product, on the tensor core of the warp's scheduler.
    const double products = 16.0 * i.count * i.bits2 * BytesOf(static_cast<Format>(i.kind2)) / 2;
    warp.product_end =
        TensorReady(cta, warp.id % 4, products, costs.wgmma_products / 4, std::max(warp.time, warp.product_end));
  }
  warp.products.push_back(std::move(op));
}

void Machine::WgmmaCommit(Context& c) {
  c.warp.product_groups.push_back(c.warp.issued);
  c.warp.product_ends.push_back(c.warp.product_end);
}

void Machine::WgmmaWait(Context& c) {
  Warp& warp = c.warp;
  const uint64_t pending = Value(c, 0, __builtin_ctz(c.mask));
  uint64_t complete = warp.committed;
  while (warp.product_groups.size() > pending) {
    complete = warp.product_groups.front();
    warp.product_groups.pop_front();
    warp.time = std::max(warp.time, warp.product_ends.front());
    warp.product_ends.pop_front();
  }
  while (warp.executed < complete) WgmmaExecute(warp);
  warp.committed = complete;
  if (options_.races) {
    for (int l = 0; l < 32; ++l) {
      if (c.mask >> l & 1) warp.lanes[l].Know(warp.wgmma_agent, static_cast<uint32_t>(complete));
    }
  }
  warp.in_flight.erase(std::remove_if(warp.in_flight.begin(), warp.in_flight.end(),
                                      [&](const Warp::InFlight& product) { return product.serial < complete; }),
                       warp.in_flight.end());
  if (warp.early && warp.in_flight.empty()) {
    warp.early = false;
    warp.fence_needed = true;
    if (warned_.insert({warp.early_site.pc, 0}).second) {
      warnings.push_back({"serialised",
                          Text("an accumulator of the wgmma of line %d is used before wgmma.wait_group: the "
                               "compiler must put a wait of its own here",
                               warp.early_line),
                          warp.early_site});
    }
  }
  ++progress_;
}

// The oldest products of a warp that add to the same accumulators, in order.
void Machine::WgmmaExecute(Warp& warp) {
  Cta& cta = *warp.cta;
  const Instr& first = program_.instructions[warp.products.front().pc];
  const Operand* operands = program_.operands.data() + first.first;
  const int columns = first.count;
  thread_local std::vector<float> sums;
  sums.assign(16 * static_cast<size_t>(columns), 0.0f);
  // Register r of lane t: row t / 4 + 8 * (r / 2 % 2), column 8 * (r / 4) + 2 * (t % 4) + r % 2.
  for (int r = 0; r < columns / 2; ++r) {
    const float* from = reinterpret_cast<const float*>(warp.registers + operands[r].place);
    for (int t = 0; t < 32; ++t) {
      sums[static_cast<size_t>(t / 4 + 8 * (r >> 1 & 1)) * columns + 8 * (r >> 2) + 2 * (t & 3) + (r & 1)] = from[t];
    }
  }
  while (!warp.products.empty()) {
    WgmmaOp& op = warp.products.front();
    const Instr& i = program_.instructions[op.pc];
    if (i.count != columns || program_.operands[i.first].place != operands[0].place) break;
    const Site site{op.pc, cta.id, warp.id, ~0u};
    Warpgroup& group = cta.warpgroups[static_cast<size_t>(warp.id) / 4];
    SharedTile& shared = group.tiles[op.serial];
    Actor actor;
    actor.access.clock = static_cast<uint32_t>(op.serial) + 1;
    actor.access.lanes = 15;
    actor.access.pc_flags = op.pc | kAsync | 15u << kBytesShift;
    actor.access.base = static_cast<uint16_t>(warp.wgmma_agent / 4 * 4);
    actor.access.cluster = cta.cluster->number;
    actor.clocks = op.clocks.get();
    const bool sixteen_bits = BytesOf(static_cast<Format>(i.variant)) == 2;
    const int lowest = static_cast<Format>(i.variant) == Format::f16 ? -14 : -126;
    if (!shared.loaded) {
      LoadTile(site, cta, {op.b, columns, i.bits2, static_cast<Format>(i.variant), (i.extra >> 3 & 1) != 0}, actor,
               shared.tile);
      if (sixteen_bits) Exponents(shared.tile.values, lowest, shared.tile.exponents);
      shared.loaded = true;
    }
    Tile a;
    actor.access.lanes = 1u << warp.wgmma_agent % 4;
    LoadTile(site, cta, {op.a, 16, i.bits2, static_cast<Format>(i.kind2), (i.extra >> 2 & 1) != 0, 16 * (warp.id % 4)},
             actor, a);
    if ((i.extra & 1) != (i.extra >> 1 & 1)) {
      for (float& value : a.values) value = -value;
    }
    if (!op.accumulate) std::fill(sums.begin(), sums.end(), 0.0f);
    if (sixteen_bits) {
      Exponents(a.values, lowest, a.exponents);
      MultiplyAddTruncating(a.values.data(), a.exponents.data(), 16, shared.tile.values.data(),
                            shared.tile.exponents.data(), columns, i.bits2, 16, columns, sums.data());
    } else {
      MultiplyAdd(a.values.data(), 16, shared.tile.values.data(), columns, i.bits2, 16, columns, sums.data());
    }
    ++warp.executed;
    if (shared.users == 4 && warp.executed > op.serial) {
      bool all = true;
      for (const Warp& other : cta.warps) {
        if (other.id / 4 == warp.id / 4) all &= other.executed > op.serial;
      }
      if (all) group.tiles.erase(op.serial);
    }
    warp.products.pop_front();
  }
  for (int r = 0; r < columns / 2; ++r) {
    float* to = reinterpret_cast<float*>(warp.registers + operands[r].place);
    for (int t = 0; t < 32; ++t) {
      to[t] = sums[static_cast<size_t>(t / 4 + 8 * (r >> 1 & 1)) * columns + 8 * (r >> 2) + 2 * (t & 3) + (r & 1)];
    }
  }
  ++progress_;
}

}  // namespace ptx
