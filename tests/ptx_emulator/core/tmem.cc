// TMEM, the memory of Blackwell's tensor core: its allocation, and what warps load from it and store to it.
#include "tmem.h"

#include <algorithm>

#include "machine.h"

namespace ptx {

Tmem& Machine::TmemOf(const Site& site, Cta& cta, int group) {
  if (!options_.blackwell) Fail("unsupported", site, "TMEM on this architecture");
  if (cta.tmem == nullptr) {
    cta.tmem = std::make_unique<Tmem>();
    cta.tmem->shadow = std::make_unique<Shadow>(uint64_t{kTmemColumns} * 32);
  }
  if (group != 0) {
    if (cta.tmem->group != 0 && cta.tmem->group != group) {
      Fail("protocol", site, "tcgen05 instructions of both cta_group::1 and cta_group::2 in one kernel");
    }
    cta.tmem->group = group;
  }
  return *cta.tmem;
}

// The CTAs that an instruction concerns, the even one first.
std::vector<Cta*> Machine::Pair(const Site& site, Cta& cta, bool pair) {
  if (!pair) return {&cta};
  Cluster& cluster = *cta.cluster;
  if ((cta.rank | 1) >= cluster.ctas.size()) Fail("protocol", site, "cta_group::2 in a CTA that has no peer");
  return {cluster.ctas[cta.rank & ~1u].get(), cluster.ctas[cta.rank | 1u].get()};
}

// Checks an access to `columns` columns of `lanes` lanes.
void Machine::TouchTmem(const Site& site, Cta& cta, uint32_t lane, uint32_t lanes, uint32_t column, uint32_t columns,
                        const Actor& actor, bool writes) {
  Tmem& tmem = TmemOf(site, cta, 0);
  if (lane + lanes > kTmemLanes || column + columns > kTmemColumns) {
    Fail("out-of-bounds", site,
         Text("TMEM lanes %u to %u, columns %u to %u", lane, lane + lanes, column, column + columns));
  }
  for (uint32_t c = column; c < column + columns; ++c) {
    if (!tmem.allocated[c]) Fail("protocol", site, Text("column %u of TMEM is not allocated", c));
  }
  if (!options_.races) return;
  const auto report = [&](const Access& before, bool before_writes, uint64_t at) {
    const bool load = program_.instructions[before.pc()].op() == Op::tc_ld && before.cluster == cta.cluster->number;
    if (load && actor.clocks->seen[before.base + cta.cluster->used_shift] >= before.clock) {
      if (!warned_.insert({before.pc(), site.pc}).second) return;
      warnings.push_back({"unwaited",
                          Text("column %u of TMEM: this comes after the tcgen05.ld of line %d because of a use of its "
                               "registers, which PTX does not promise: tcgen05.wait::ld would order them",
                               static_cast<uint32_t>(at / 32), program_.instructions[before.pc()].line),
                          site});
      return;
    }
    Race("TMEM", site, before, before_writes, writes, at, *cta.cluster,
         Text("column %u, lanes from %u", static_cast<uint32_t>(at / 32), static_cast<uint32_t>(at % 32 * 4)));
  };
  const uint32_t first = lane / 16, last = (lane + lanes - 1) / 16;
  if (first == 0 && last == 7) {
    tmem.shadow->Touch(uint64_t{column} * 32, uint64_t{columns} * 32, actor, writes, report);
    return;
  }
  for (uint32_t c = column; c < column + columns; ++c) {
    tmem.shadow->Touch(uint64_t{c} * 32 + first * 4, (last - first + 1) * 4, actor, writes, report);
  }
}

namespace {

// Free columns, or -1.
int FindColumns(const Tmem& tmem, uint32_t columns) {
  for (uint32_t base = 0; base + columns <= kTmemColumns; base += columns) {
    bool free = true;
    for (uint32_t c = base; c < base + columns; ++c) free &= !tmem.allocated[c];
    if (free) return static_cast<int>(base);
  }
  return -1;
}

}  // namespace

Step Machine::TcAlloc(Context& c) {
  Warp& warp = c.warp;
  const Site site = c.site(*this);
  const bool pair = c.instr.has(k_pair);
  Tmem& tmem = TmemOf(site, *warp.cta, pair ? 2 : 1);
  const int lane = __builtin_ctz(c.mask);
  const uint32_t columns = static_cast<uint32_t>(Value(c, 1, lane));
  if (columns < 32 || columns > kTmemColumns || (columns & (columns - 1)) != 0) {
    Fail("protocol", site, Text("%u columns: a power of two from 32 to 512 can be allocated", columns));
  }
  if (tmem.relinquished) Fail("protocol", site, "an allocation after relinquish_alloc_permit");
  if (pair) {
    // Both CTAs of a pair must take part.
    if (!c.fragment.arrived) {
      c.fragment.arrived = true;
      ++tmem.pair_requests;
      ++progress_;
    }
    for (Cta* cta : Pair(site, *warp.cta, true)) {
      if (TmemOf(site, *cta, 2).pair_requests < tmem.pair_requests) {
        c.fragment.wait = {Wait::kPeer, cta, 0, tmem.pair_requests};
        return Step::kBlocked;
      }
    }
  }
  if (pair && options_.races) {
    for (const Cta* cta : Pair(site, *warp.cta, true)) {
      for (Clocks& clocks : warp.lanes) clocks.Know(warp.cta->cluster->first_begun + cta->rank, 1);
    }
  }
  const int base = FindColumns(tmem, columns);
  if (base < 0) {
    c.fragment.wait = {Wait::kTmem, warp.cta, columns, 0};
    return Step::kBlocked;
  }
  c.fragment.arrived = false;
  std::fill_n(tmem.allocated.begin() + base, columns, true);
  tmem.allocations[static_cast<uint32_t>(base)] = columns;
  for (uint32_t l = 0; l < kTmemLanes; ++l) {  // an allocation holds nothing
    std::memset(tmem.written.data() + l * kTmemColumns + base, 0, columns);
  }
  const uint32_t address = static_cast<uint32_t>(base);
  const SharedPlace place = Shared(site, *warp.cta->cluster, static_cast<uint32_t>(Address(c, 0, lane)), 4, 4);
  WriteShared(site, *place.cta, place.offset, 4, LaneActor(c, lane), &address);
  return Step::kNext;
}

void Machine::TcDealloc(Context& c) {
  Warp& warp = c.warp;
  const Site site = c.site(*this);
  Tmem& tmem = TmemOf(site, *warp.cta, c.instr.has(k_pair) ? 2 : 1);
  if (c.instr.op() == Op::tc_relinquish) {
    tmem.relinquished = true;
    return;
  }
  const int lane = __builtin_ctz(c.mask);
  const uint32_t base = ColumnOf(static_cast<uint32_t>(Value(c, 0, lane)));
  const uint32_t columns = static_cast<uint32_t>(Value(c, 1, lane));
  const auto found = tmem.allocations.find(base);
  if (found == tmem.allocations.end() || found->second != columns) {
    Fail("protocol", site,
         Text("%u columns from column %u are freed, and were not allocated like this", columns, base));
  }
  Clocks known;
  Actor actor = LaneActor(c, lane);
  if (options_.races) {
    known = warp.lanes[lane];
    actor.clocks = &known;
    for (int l = 0; l < 32; ++l) {
      if (c.mask >> l & 1) Join(known, warp.lanes[l]);
    }
  }
  // Whoever used the columns must be through, in both CTAs of a pair; the other one frees its own.
  actor.access.pc_flags |= kAtomic;
  for (Cta* cta : Pair(site, *warp.cta, c.instr.has(k_pair))) {
    if (cta == warp.cta || (cta->tmem != nullptr && cta->tmem->allocations.count(base) != 0)) {
      TouchTmem(site, *cta, 0, kTmemLanes, base, columns, actor, true);
    }
  }
  std::fill_n(tmem.allocated.begin() + base, columns, false);
  tmem.allocations.erase(found);
  ++progress_;
}

// The warp's loads from TMEM, or its stores to it, are over up to one: every lane knows.
void Machine::TcFinish(Warp& warp, bool loads, uint64_t serial) {
  const Op op = loads ? Op::tc_ld : Op::tc_st;
  std::erase_if(warp.tmem_pending, [&](const Warp::InFlight& access) {
    return access.serial <= serial && program_.instructions[access.pc].op() == op;
  });
  if (!options_.races) return;
  const uint32_t agent = loads ? warp.wgmma_agent : warp.store_agent;
  for (Clocks& clocks : warp.lanes) clocks.Know(agent, static_cast<uint32_t>(serial));
}

// Registers of loads from TMEM, up to one, have been used: they are over, and those who rely on that should not.
void Machine::TcUsed(Warp& warp, uint64_t serial) {
  std::erase_if(warp.tmem_pending, [&](const Warp::InFlight& access) {
    return access.serial <= serial && program_.instructions[access.pc].op() == Op::tc_ld;
  });
  if (!options_.races) return;
  const uint32_t agent = warp.wgmma_agent + warp.cta->cluster->used_shift;
  for (Clocks& clocks : warp.lanes) clocks.Know(agent, static_cast<uint32_t>(serial));
}

void Machine::TcWait(Context& c) { TcFinish(c.warp, c.instr.variant == 0, c.warp.issued); }

// An instruction touches registers that loads from TMEM write, or names of theirs. What reads them comes after the load
// (PTX ISA, 9.7.16.6.4.5: true dependencies are respected); what writes them may come before.
void Machine::CheckLoads(Context& c) {
  constexpr int kLoadShift = 8;  // registers.py
  constexpr int64_t kManyLoads = int64_t{1} << 32;
  const Op op = c.instr.op();
  const bool moves = op == Op::mov || op == Op::pack || op == Op::unpack;
  uint64_t last = 0;  // load that is read
  for (Warp::InFlight& access : c.warp.tmem_pending) {
    const Instr& load = program_.instructions[access.pc];
    if (load.op() != Op::tc_ld) continue;
    const Operand* registers = program_.operands.data() + load.first;
    bool writes = false;
    for (int o = 0; o < c.instr.operands; ++o) {
      const Operand& operand = c.operands[o];
      const int64_t of = operand.tracked >> kLoadShift;
      if (of == kManyLoads || of == int64_t{access.pc} + 1) last = access.serial;
      if (!(operand.tracked & (kReadLoaded | kWritesLoaded)) || (!moves && !(operand.tracked & kWritesLoaded)))
        continue;
      const bool same =
          std::any_of(registers, registers + load.count, [&](const Operand& r) { return r.place == operand.place; });
      if (!same) continue;
      (operand.tracked & kWritesLoaded ? writes : access.read) = true;
    }
    if (writes && !access.read && last < access.serial) {
      Fail("protocol", c.site(*this),
           Text("the tcgen05.ld of line %d may write this result's register later: tcgen05.wait::ld must come before",
                load.line));
    }
  }
  if (last != 0) TcUsed(c.warp, last);
}

void Machine::TcLoadStore(Context& c) {
  const Instr& i = c.instr;
  Warp& warp = c.warp;
  const Site site = c.site(*this);
  Tmem& tmem = TmemOf(site, *warp.cta, 0);
  const bool loads = i.op() == Op::tc_ld;
  const int lane = __builtin_ctz(c.mask), address_at = loads ? i.count : 0, first = loads ? 0 : 1;
  const uint32_t address = static_cast<uint32_t>(Address(c, address_at, lane));
  for (int l = 0; l < 32; ++l) {
    if (c.mask >> l & 1 && static_cast<uint32_t>(Address(c, address_at, l)) != address) {
      Fail("protocol", site, Text("lanes %d and %d have different TMEM addresses", lane, l));
    }
  }
  const uint32_t base = LaneOf(address), column = ColumnOf(address);
  const auto shape = static_cast<TmemShape>(i.variant);
  const bool whole = shape == TmemShape::x32x32b;
  const uint32_t own = 32 * (static_cast<uint32_t>(warp.id) % 4);
  if (whole ? base != own : base != own && base != own + 16) {
    Fail("protocol", site,
         Text("warp %d may touch lanes %u to %u of TMEM, the address has lane %u", warp.id, own, own + 31, base));
  }
  const uint32_t per = i.has(k_pack16) ? 2 : 1;
  const auto place = [&](uint32_t t, uint32_t r, uint32_t& at_lane, uint32_t& at_column) {
    switch (shape) {
      case TmemShape::x32x32b:
        at_lane = t;
        at_column = r;
        break;
      case TmemShape::x16x64b:
        at_lane = t / 4 + 8 * (t % 2);
        at_column = t / 2 % 2 + 2 * r;
        break;
      case TmemShape::x16x128b:
        at_lane = t / 4 + 8 * (r & 1);
        at_column = t % 4 + 4 * (r >> 1);
        break;
      case TmemShape::x16x256b:
        at_lane = t / 4 + 8 * (r >> 1 & 1);
        at_column = 2 * (t % 4) + (r & 1) + 8 * (r >> 2);
        break;
      case TmemShape::x16x32bx2:
        at_lane = t % 16;
        at_column = r + (t >= 16 ? static_cast<uint32_t>(i.extra) : 0);
        break;
    }
    at_lane += base;
    at_column = column + at_column * per;
  };
  uint32_t columns = 0;
  for (uint32_t t = 0; t < 32; t += 31) {
    uint32_t at_lane = 0, at_column = 0;
    place(t, static_cast<uint32_t>(i.count) - 1, at_lane, at_column);
    columns = std::max(columns, at_column + per - column);
  }
  // The warp acts as one: .sync.aligned. The access relies on what all lanes know: not on the warp's own accesses
  // before it, which may come later (PTX ISA, 9.7.16.6.2 and .4.2). It is over when it has been waited for.
  Actor actor = LaneActor(c, lane);
  actor.access.base = static_cast<uint16_t>(loads ? warp.wgmma_agent : warp.store_agent);
  actor.access.lanes = 1;
  actor.access.clock = static_cast<uint32_t>(++warp.issued);
  Clocks known;
  if (options_.races) {
    known = warp.lanes[lane];
    for (int l = 0; l < 32; ++l) {
      if (c.mask >> l & 1) Meet(known, warp.lanes[l]);
    }
    actor.clocks = &known;
  }
  TouchTmem(site, *warp.cta, base, whole ? 32 : 16, column, columns, actor, !loads);
  warp.tmem_pending.push_back({warp.issued, c.fragment.pc});
  for (uint32_t r = 0; r < static_cast<uint32_t>(i.count); ++r) {
    for (uint32_t t = 0; t < 32; ++t) {
      uint32_t at_lane = 0, at_column = 0;
      place(t, r, at_lane, at_column);
      const size_t at = at_lane * kTmemColumns + at_column;
      const int operand = first + static_cast<int>(r);
      if (loads) {
        if (!tmem.written[at] || !tmem.written[at + per - 1]) {
          Fail("uninitialised", site, Text("lane %u, column %u of TMEM was never written", at_lane, at_column));
        }
        Put(c, operand, static_cast<int>(t),
            per == 1 ? tmem.words[at] : (tmem.words[at] & 0xffff) | tmem.words[at + 1] << 16);
        continue;
      }
      const uint32_t value = static_cast<uint32_t>(Value(c, operand, static_cast<int>(t)));
      if (per == 1) {
        tmem.words[at] = value;
      } else {
        tmem.words[at] = value & 0xffff;
        tmem.words[at + 1] = value >> 16;
      }
      tmem.written[at] = tmem.written[at + per - 1] = 1;
    }
  }
}

}  // namespace ptx
