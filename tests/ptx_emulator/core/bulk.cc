// Bulk copies without tensor maps, their groups, asynchronous stores, and cluster launch control, which answers by one.
#include <algorithm>

#include "machine.h"

namespace ptx {

constexpr uint64_t kNoCluster = 0x5eadbeef;

// Stores of a warp's lanes into the shared memory of a cluster, which tell an mbarrier when they are done. They are of
// the generic proxy. Each lane's is an operation of its own.
void Machine::StoreAsync(Context& c) {
  const Instr& i = c.instr;
  Cluster& cluster = *c.warp.cta->cluster;
  const Site site = c.site(*this);
  const uint32_t size = static_cast<uint32_t>(i.bits / 8), bytes = size * static_cast<uint32_t>(i.count);
  struct Store {
    SharedPlace place;
    uint32_t barrier, lane;
    std::array<uint8_t, 16> data;
  };
  std::vector<Store> stores;
  for (int l = 0; l < 32; ++l) {
    if (!(c.mask >> l & 1)) continue;
    Store store;
    store.lane = static_cast<uint32_t>(l);
    store.place = Shared(site, cluster, static_cast<uint32_t>(Address(c, 0, l)), bytes, bytes);
    store.barrier = static_cast<uint32_t>(Address(c, 1 + i.count, l));
    SharedPlace barrier_place;
    Barrier(site, cluster, store.barrier, &barrier_place);
    if (barrier_place.cta != store.place.cta)
      Fail("protocol", site, "the mbarrier is in another CTA than the destination");
    for (int j = 0; j < i.count; ++j) {
      const uint64_t value = Value(c, 1 + j, l);
      std::memcpy(store.data.data() + j * size, &value, size);
    }
    stores.push_back(store);
  }
  AsyncOp first = StartAsync(c, __builtin_ctz(c.mask));
  const uint32_t slot = cluster.next_wide_slot++ % Cluster::kWideSlots;
  first.agent = cluster.first_wide_slot + slot * 32;
  first.clock = ++cluster.wide_slot_clocks[slot];
  if (options_.races) {
    // What all of the lanes know, and of the operations before in this place.
    for (int l = 0; l < 32; ++l) {
      if (c.mask >> l & 1) Meet(*first.clocks, c.warp.lanes[l]);
    }
    for (uint32_t l = 0; l < 32; ++l) first.clocks->Know(first.agent + l, first.clock - 1);
  }
  const uint32_t pc = c.fragment.pc;
  cluster.tasks.push_back({[=, this, &cluster] {
                             AsyncOp op = first;
                             for (const Store& store : stores) {
                               op.agent = first.agent + store.lane;
                               Actor actor = AsyncActor(op, pc, false);
                               actor.access.pc_flags &= ~kAsync;
                               WriteShared(site, *store.place.cta, store.place.offset, bytes, actor, store.data.data());
                               Complete(site, cluster, store.barrier, op, bytes);
                             }
                           },
                           site, now_ + costs.barrier});
}

void Machine::BulkLoad(Context& c) {
  Cluster& cluster = *c.warp.cta->cluster;
  for (uint32_t left = c.mask; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    Site site = c.site(*this);
    site.lanes = 1u << lane;
    const uint32_t bytes = static_cast<uint32_t>(Value(c, 2, lane));
    const uint64_t from = Address(c, 1, lane);
    if (bytes % 16 != 0 || from % 16 != 0) Fail("misaligned", site, "bulk copies go by multiples of 16 bytes");
    const SharedPlace place = Shared(site, cluster, static_cast<uint32_t>(Address(c, 0, lane)), bytes, 16);
    CheckWindow(c, site, place);
    const uint32_t barrier_address = static_cast<uint32_t>(Address(c, 3, lane));
    SharedPlace barrier_place;
    Barrier(site, cluster, barrier_address, &barrier_place);
    if (barrier_place.cta != place.cta) Fail("protocol", site, "the mbarrier is in another CTA than the destination");
    const AsyncOp op = StartAsync(c, lane);
    const uint32_t pc = c.fragment.pc;
    cluster.tasks.push_back({[=, this, &cluster] {
                               const Actor actor = AsyncActor(op, pc, false);
                               std::vector<uint8_t> data(bytes);
                               ReadGlobal(site, cluster, from, bytes, actor, data.data());
                               WriteShared(site, *place.cta, place.offset, bytes, actor, data.data());
                               Complete(site, cluster, barrier_address, op, bytes);
                             },
                             site, LoadReady(*place.cta, bytes, LoadCycles(bytes, from))});
  }
}

void Machine::BulkStore(Context& c) {
  Cluster& cluster = *c.warp.cta->cluster;
  for (uint32_t left = c.mask; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    Site site = c.site(*this);
    site.lanes = 1u << lane;
    const uint32_t bytes = static_cast<uint32_t>(Value(c, 2, lane));
    const uint64_t to = Address(c, 0, lane);
    if (bytes % 16 != 0 || to % 16 != 0) Fail("misaligned", site, "bulk copies go by multiples of 16 bytes");
    const SharedPlace place = Shared(site, cluster, static_cast<uint32_t>(Address(c, 1, lane)), bytes, 16);
    CheckWindow(c, site, place);
    const AsyncOp op = StartAsync(c, lane);
    auto bulk = std::make_shared<BulkOp>();
    bulk->agent = op.agent;
    bulk->pc = c.fragment.pc;
    bulk->read_clock = op.clock;
    bulk->write_clock = op.clock + 1;
    c.warp.open_group.lanes |= 1u << lane;
    c.warp.open_group.ops.push_back(bulk);
    const uint32_t pc = c.fragment.pc;
    cluster.tasks.push_back({[=, this, &cluster] {
                               std::vector<uint8_t> data(bytes);
                               ReadShared(site, *place.cta, place.offset, bytes, AsyncActor(op, pc, false),
                                          data.data());
                               WriteGlobal(site, cluster, to, bytes, AsyncActor(op, pc, true), data.data());
                               bulk->read = bulk->done = true;
                               bulk->time = now_;
                               ++progress_;
                             },
                             site, StoreReady(*place.cta, bytes)});
  }
}

void Machine::BulkCommit(Context& c) {
  BulkGroup group;
  group.lanes = c.mask;
  if ((c.warp.open_group.lanes & ~c.mask) == 0) {
    std::swap(group.ops, c.warp.open_group.ops);
    c.warp.open_group.lanes = 0;
  } else if ((c.warp.open_group.lanes & c.mask) != 0) {
    Fail("unsupported", c.site(*this), "lanes of a warp commit the same copies in different places");
  }
  c.warp.groups.push_back(std::move(group));
}

Step Machine::BulkWait(Context& c) {
  const int lane = __builtin_ctz(c.mask);
  const uint32_t pending = static_cast<uint32_t>(Value(c, 0, lane));
  const bool reading = c.instr.has(k_read);
  uint32_t newer = 0;
  std::vector<BulkGroup*> waited;
  for (auto group = c.warp.groups.rbegin(); group != c.warp.groups.rend(); ++group) {
    if (!(group->lanes & c.mask)) continue;
    if (newer++ >= pending) waited.push_back(&*group);
  }
  for (BulkGroup* group : waited) {
    for (const auto& op : group->ops) {
      if (!(reading ? op->read : op->done)) {
        c.fragment.wait = {Wait::kBulkGroups, c.warp.cta, pending, reading};
        return Step::kBlocked;
      }
    }
  }
  for (BulkGroup* group : waited) {
    for (const auto& op : group->ops) {
      op->waited = true;
      if (op->time > c.warp.time) c.warp.time = op->time;
    }
  }
  if (options_.races) {
    for (BulkGroup* group : waited) {
      for (const auto& op : group->ops) {
        for (int l = 0; l < 32; ++l) {
          if (c.mask & group->lanes & 1u << l)
            c.warp.lanes[l].Know(op->agent, reading ? op->read_clock : op->write_clock);
        }
      }
    }
  }
  // Groups that are over long ago are of no interest, unless somebody waits for their writes much later.
  while (c.warp.groups.size() > 256) c.warp.groups.pop_front();
  return Step::kNext;
}

// Takes a cluster that has not started. The response is a bulk write of 16 bytes.
void Machine::TryCancel(Context& c) {
  Cluster& cluster = *c.warp.cta->cluster;
  const int lane = __builtin_ctz(c.mask);
  Site site = c.site(*this);
  if (c.mask & (c.mask - 1)) Fail("protocol", site, "several lanes ask for a cluster at once");
  if (c.warp.cta->refused) {
    Fail("protocol", site, "a CTA asks for a cluster that has seen already that none is left: this is undefined");
  }
  const uint32_t to = static_cast<uint32_t>(Address(c, 0, lane)), signal = static_cast<uint32_t>(Address(c, 1, lane));
  const SharedPlace place = Shared(site, cluster, to, 16, 16);
  SharedPlace barrier_place;
  Barrier(site, cluster, signal, &barrier_place);
  std::array<uint32_t, 4> response{};
  if (!waiting_.empty()) {
    const Dim3 next = waiting_.front();
    waiting_.pop_front();
    response = {next.x * options_.cluster.x, next.y * options_.cluster.y, next.z * options_.cluster.z, 1};
  }
  std::vector<Cta*> targets = {place.cta};
  if (c.instr.has(k_multicast)) {
    targets.clear();
    for (const auto& cta : cluster.ctas) targets.push_back(cta.get());
  }
  for (Cta* target : targets) {
    const AsyncOp op = StartAsync(c, lane);
    const uint32_t pc = c.fragment.pc;
    cluster.tasks.push_back({[=, this, &cluster] {
                               WriteShared(site, *target, place.offset, 16, AsyncActor(op, pc, false), response.data());
                               Complete(site, cluster, target->rank << kRankShift | barrier_place.offset, op, 16);
                             },
                             site, now_ + costs.barrier});
  }
}

// Decodes a response, which is opaque to programs; here it is {x, y, z, whether there is one}. Where there is none, its
// number is undefined; CUTLASS's kernels decode it all the same, and do not use it.
void Machine::QueryCancel(Context& c) {
  const uint64_t* low = Source<uint64_t>(c, 1);
  const uint64_t* high = low + 32;
  for (int l = 0; l < 32; ++l) {
    if (!(c.mask >> l & 1)) continue;
    const uint64_t words[4] = {low[l] & 0xffffffff, low[l] >> 32, high[l] & 0xffffffff, high[l] >> 32};
    const bool taken = words[3] & 1;
    if (c.instr.op() == Op::clc_is_canceled) {
      c.warp.cta->refused = c.warp.cta->refused || !taken;
      Put(c, 0, l, taken);
      continue;
    }
    Put(c, 0, l, taken ? words[c.instr.extra] : kNoCluster);
  }
}

}  // namespace ptx
