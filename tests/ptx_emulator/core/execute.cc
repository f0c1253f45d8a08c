// One instruction of a group of lanes: what stays within a warp is done here.
#include "lanes.h"
#include "machine.h"

namespace ptx {

// Registers that something may read before it is written, by lane (registers.py finds which those are).
void Machine::TrackRegisters(Context& c) {
  std::vector<uint32_t>& written = c.warp.written;
  const auto check = [&](int64_t place, uint32_t lanes) {
    const uint32_t missing = lanes & ~written[static_cast<size_t>(place) / 32];
    if (missing == 0) return;
    Site site = c.site(*this);
    site.lanes = missing;
    Fail("uninitialised", site, Text("{register %lld} was never written", static_cast<long long>(place)));
  };
  if (c.instr.has(k_tracked_guard)) check(c.instr.guard, c.fragment.mask);
  if (c.mask == 0) return;
  uint32_t adds = c.mask;  // lanes that read accumulators
  if (c.instr.op() == Op::wgmma_mma) adds &= *Source<uint32_t>(c, c.instr.count / 2 + 2);
  for (int o = 0; o < c.instr.operands; ++o) {
    const Operand& operand = c.operands[o];
    if (operand.tracked & kRead) check(operand.place, operand.tracked & kWritten ? adds : c.mask);
  }
  for (int o = 0; o < c.instr.operands; ++o) {
    if (c.operands[o].tracked & kWritten) written[static_cast<size_t>(c.operands[o].place) / 32] |= c.mask;
  }
}

// Registers go from warp to warp through a pool of the CTA.
Step Machine::SetRegisters(Context& c) {
  Warp& warp = c.warp;
  Cta& cta = *warp.cta;
  const uint32_t wanted = Source<uint32_t>(c, 0)[__builtin_ctz(c.mask)];
  const bool more = c.instr.variant != 0;
  if (wanted < 24 || wanted > 256 || wanted % 8 != 0) {
    Fail("protocol", c.site(*this), Text("%u registers: it must be a multiple of 8 from 24 to 256", wanted));
  }
  if (warp.register_count == 0) {  // it is not known how many there are
    warp.requests.push_back({c.fragment.pc, wanted});
    return Step::kNext;
  }
  if (more ? wanted < warp.register_count : wanted > warp.register_count) {
    Fail("protocol", c.site(*this), Text("%u registers are asked for, the warp has %u", wanted, warp.register_count));
  }
  if (more && (wanted - warp.register_count) * 32 > cta.free_registers) {
    c.fragment.wait = {Wait::kRegisters, &cta, (wanted - warp.register_count) * 32, 0};
    return Step::kBlocked;
  }
  cta.free_registers += (warp.register_count - wanted) * 32;  // modulo 2^32
  warp.register_count = wanted;
  warp.requests.push_back({c.fragment.pc, wanted});
  ++progress_;
  return Step::kNext;
}

Step Machine::Execute(Context& c) {
  const Instr& i = c.instr;
  if (i.has(k_tracked)) TrackRegisters(c);
  if (!c.warp.tmem_pending.empty() && (i.has(k_touches_loads) || i.has(k_names_loads))) CheckLoads(c);
  if (i.has(k_touches_accumulators) && i.op() != Op::wgmma_mma) CheckAccumulators(c);
  const int lane = __builtin_ctz(c.mask);
  switch (i.op()) {
    case Op::mov:
      if (i.kind == 'p') {
        uint32_t& d = *Destination<uint32_t>(c, 0);
        d = (d & ~c.mask) | (*Source<uint32_t>(c, 1) & c.mask);
      } else if (i.bits == 32 && c.operands[0].bits <= 32) {
        Blend(Destination<uint32_t>(c, 0), Source<uint32_t>(c, 1), c.mask);
      } else if (i.bits == 64 && c.operands[1].bits == 64) {
        Blend(Destination<uint64_t>(c, 0), Source<uint64_t>(c, 1), c.mask);
      } else if (i.bits == 128) {
        Blend(Destination<uint64_t>(c, 0), Source<uint64_t>(c, 1), c.mask);
        Blend(Destination<uint64_t>(c, 0) + 32, Source<uint64_t>(c, 1) + 32, c.mask);
      } else {
        for (int l = 0; l < 32; ++l) {
          if (c.mask >> l & 1) Put(c, 0, l, Truncate(Value(c, 1, l), i.bits));
        }
      }
      return Step::kNext;
    case Op::pack:
      if (i.bits == 128) {
        Blend(Destination<uint64_t>(c, 0), Source<uint64_t>(c, 1), c.mask);
        Blend(Destination<uint64_t>(c, 0) + 32, Source<uint64_t>(c, 2), c.mask);
        return Step::kNext;
      }
      for (int l = 0; l < 32; ++l) {
        if (!(c.mask >> l & 1)) continue;
        uint64_t value = 0;
        const int width = i.bits / i.count;
        for (int j = 0; j < i.count; ++j) value |= Truncate(Value(c, 1 + j, l), width) << (j * width);
        Put(c, 0, l, value);
      }
      return Step::kNext;
    case Op::unpack:
      if (i.bits == 128) {
        for (int j = 0; j < 2; ++j) {
          if (c.operands[j].kind != kSink) {
            Blend(Destination<uint64_t>(c, j), Source<uint64_t>(c, 2) + 32 * j, c.mask);
          }
        }
        return Step::kNext;
      }
      for (int l = 0; l < 32; ++l) {
        if (!(c.mask >> l & 1)) continue;
        const uint64_t value = Value(c, i.count, l);
        const int width = i.bits / i.count;
        for (int j = 0; j < i.count; ++j) Put(c, j, l, Truncate(value >> (j * width), width));
      }
      return Step::kNext;
    case Op::setp: {
      const Compare how = static_cast<Compare>(i.variant);
      uint32_t r = 0;
      if (i.bits == 32 && i.has(k_ftz)) {
        float a[32], b[32];
        for (int l = 0; l < 32; ++l) {
          a[l] = Flush(Source<float>(c, 2)[l]);
          b[l] = Flush(Source<float>(c, 3)[l]);
        }
        r = CompareLanes(how, a, b);
      } else if (i.bits == 32 && i.kind == 'f') {
        r = CompareLanes(how, Source<float>(c, 2), Source<float>(c, 3));
      } else if (i.bits == 16 && i.kind == 'f') {
        float a[32], b[32];
        for (int l = 0; l < 32; ++l) {
          a[l] = HalfTable()[Value(c, 2, l) & 0xffff];
          b[l] = HalfTable()[Value(c, 3, l) & 0xffff];
        }
        r = CompareLanes(how, a, b);
      } else if (i.bits == 64 && i.kind == 'f') {
        r = CompareLanes(how, Source<double>(c, 2), Source<double>(c, 3));
      } else if (i.bits == 32 && i.kind == 's') {
        r = CompareLanes(how, Source<int32_t>(c, 2), Source<int32_t>(c, 3));
      } else if (i.bits == 32) {
        r = CompareLanes(how, Source<uint32_t>(c, 2), Source<uint32_t>(c, 3));
      } else if (i.bits == 64 && i.kind == 's') {
        r = CompareLanes(how, Source<int64_t>(c, 2), Source<int64_t>(c, 3));
      } else if (i.bits == 64) {
        r = CompareLanes(how, Source<uint64_t>(c, 2), Source<uint64_t>(c, 3));
      } else {
        int64_t a[32], b[32];
        for (int l = 0; l < 32; ++l) {
          a[l] = static_cast<int64_t>(Truncate(Value(c, 2, l), i.bits));
          b[l] = static_cast<int64_t>(Truncate(Value(c, 3, l), i.bits));
          if (i.kind == 's') {
            a[l] = Extend(static_cast<uint64_t>(a[l]), i.bits);
            b[l] = Extend(static_cast<uint64_t>(b[l]), i.bits);
          }
        }
        r = CompareLanes(how, a, b);
      }
      const uint32_t both[2] = {r, ~r};
      const uint32_t third = i.extra == 0 ? 0 : *Source<uint32_t>(c, 4);  // may be a destination too
      for (int d = 0; d < 2; ++d) {
        if (c.operands[d].kind == kSink) continue;
        uint32_t value = both[d];
        if (i.extra != 0) {
          const uint32_t other = i.count < 0 ? ~third : third;
          value = i.extra == 1 ? value & other : i.extra == 2 ? value | other : value ^ other;
        }
        uint32_t& destination = *Destination<uint32_t>(c, d);
        destination = (destination & ~c.mask) | (value & c.mask);
      }
      return Step::kNext;
    }
    case Op::selp: {
      const uint32_t p = *Source<uint32_t>(c, 3);
      if (i.bits == 64) {
        const uint64_t *a = Source<uint64_t>(c, 1), *b = Source<uint64_t>(c, 2);
        uint64_t r[32];
        for (int l = 0; l < 32; ++l) r[l] = p >> l & 1 ? a[l] : b[l];
        Blend(Destination<uint64_t>(c, 0), r, c.mask);
      } else {
        const uint32_t *a = Source<uint32_t>(c, 1), *b = Source<uint32_t>(c, 2);
        uint32_t r[32];
        for (int l = 0; l < 32; ++l) r[l] = p >> l & 1 ? a[l] : b[l];
        Blend(Destination<uint32_t>(c, 0), r, c.mask);
      }
      return Step::kNext;
    }
    case Op::cvt:
      Convert(c);
      return Step::kNext;
    case Op::cvt_pack:
      ConvertPairs(c);
      return Step::kNext;
    case Op::cvta_shared:
      for (int l = 0; l < 32; ++l) {
        if (c.mask >> l & 1) Put(c, 0, l, Value(c, 1, l) | kSharedWindow);
      }
      return Step::kNext;
    case Op::cvta_to_shared:
      for (int l = 0; l < 32; ++l) {
        if (c.mask >> l & 1) Put(c, 0, l, Truncate(Value(c, 1, l), 32));
      }
      return Step::kNext;
    case Op::mapa:
      for (int l = 0; l < 32; ++l) {
        if (c.mask >> l & 1) Put(c, 0, l, (Value(c, 1, l) & kOffsetMask) | Value(c, 2, l) << kRankShift);
      }
      return Step::kNext;
    case Op::shfl:
      if (!MembersMeet(c, 5)) return Step::kBlocked;
      Shuffle(c);
      return Step::kNext;
    case Op::vote:
      if (!MembersMeet(c, 2)) return Step::kBlocked;
      VoteAll(c);
      return Step::kNext;
    case Op::elect:
      if (!MembersMeet(c, 2)) return Step::kBlocked;
      Elect(c);
      return Step::kNext;
    case Op::activemask:
      for (int l = 0; l < 32; ++l) {
        if (c.mask >> l & 1) Put(c, 0, l, c.mask);
      }
      return Step::kNext;
    case Op::nop:
      return Step::kNext;
    case Op::trap:
      Fail("protocol", c.site(*this), "the kernel stopped itself with trap");
    case Op::setmaxnreg: {
      if (!Converged(c, ~0u)) return Step::kBlocked;
      return SetRegisters(c);
    }
    case Op::bar_warp_sync:
      if (!MembersMeet(c, 0)) return Step::kBlocked;
      SyncWarp(c);
      return Step::kNext;
    case Op::bar_sync:
      return BarSync(c, true);
    case Op::bar_arrive:
      return BarSync(c, false);
    case Op::cluster_arrive:
      ClusterArrive(c);
      return Step::kNext;
    case Op::cluster_wait:
      return ClusterWait(c);
    case Op::fence:
      FenceThread(c);
      return Step::kNext;
    case Op::fence_proxy_async:
      FenceAsync(c);
      return Step::kNext;
    case Op::fence_mbarrier_init:
      FenceMbarrierInit(c);
      return Step::kNext;
    case Op::mbarrier_init:
    case Op::mbarrier_inval:
      MbarrierInit(c);
      return Step::kNext;
    case Op::mbarrier_arrive:
    case Op::mbarrier_expect_tx:
    case Op::mbarrier_complete_tx:
      MbarrierArrive(c);
      return Step::kNext;
    case Op::mbarrier_wait:
      return MbarrierWait(c);
    case Op::ld:
    case Op::st:
      LoadStore(c);
      return Step::kNext;
    case Op::st_async:
      StoreAsync(c);
      return Step::kNext;
    case Op::atom:
      AtomicOp(c);
      return Step::kNext;
    case Op::stmatrix:
    case Op::ldmatrix:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      Matrix(c);
      return Step::kNext;
    case Op::tma_load:
      TmaLoad(c);
      return Step::kNext;
    case Op::tma_store:
      TmaStore(c);
      return Step::kNext;
    case Op::bulk_load:
      BulkLoad(c);
      return Step::kNext;
    case Op::bulk_store:
      BulkStore(c);
      return Step::kNext;
    case Op::bulk_commit:
      BulkCommit(c);
      return Step::kNext;
    case Op::bulk_wait:
      return BulkWait(c);
    case Op::prefetch_tensormap: {
      const uint64_t address = Address(c, 0, lane);
      if (memory_.Find(address, 128) == nullptr) {
        Fail("out-of-bounds", c.site(*this), Text("no tensor map is there: %s", memory_.Nearest(address).c_str()));
      }
      return Step::kNext;
    }
    case Op::tensormap_replace:
      TensorMapReplace(c);
      return Step::kNext;
    case Op::wgmma_fence:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      c.warp.fence_needed = false;
      c.warp.touched.clear();
      return Step::kNext;
    case Op::wgmma_commit:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      WgmmaCommit(c);
      return Step::kNext;
    case Op::wgmma_wait:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      WgmmaWait(c);
      return Step::kNext;
    case Op::wgmma_mma:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      WgmmaIssue(c);
      return Step::kNext;
    case Op::tc_alloc:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      return TcAlloc(c);
    case Op::tc_dealloc:
    case Op::tc_relinquish:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      TcDealloc(c);
      return Step::kNext;
    case Op::tc_mma:
      TcMma(c);
      return Step::kNext;
    case Op::tc_commit:
      TcCommit(c);
      return Step::kNext;
    case Op::tc_cp:
      TcCp(c);
      return Step::kNext;
    case Op::tc_ld:
    case Op::tc_st:
      if (!Converged(c, ~0u)) return Step::kBlocked;
      TcLoadStore(c);
      return Step::kNext;
    case Op::tc_wait:
      TcWait(c);
      return Step::kNext;
    case Op::tc_fence:
      return Step::kNext;
    case Op::clc_try_cancel:
      TryCancel(c);
      return Step::kNext;
    case Op::clc_is_canceled:
    case Op::clc_first_ctaid:
      QueryCancel(c);
      return Step::kNext;
    case Op::bra:
    case Op::ret:
      return Step::kNext;  // run by the scheduler
    default:
      Alu(c);
      return Step::kNext;
  }
}

}  // namespace ptx
