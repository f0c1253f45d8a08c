// Who runs next: clusters, warps, groups of lanes, asynchronous operations, in seeded random order.
#include <algorithm>

#include "machine.h"

namespace ptx {

Machine::Machine(const Program& program, const Options& options, GlobalMemory& memory)
    : program_(program), options_(options), memory_(memory), random_(options.seed) {
  executed.assign(program.instructions.size(), 0);
  constants_ = program.constants;
  const Dim3 clusters{options.grid.x / options.cluster.x, options.grid.y / options.cluster.y,
                      options.grid.z / options.cluster.z};
  for (uint32_t z = 0; z < clusters.z; ++z) {
    for (uint32_t y = 0; y < clusters.y; ++y) {
      for (uint32_t x = 0; x < clusters.x; ++x) waiting_.push_back({x, y, z});
    }
  }
}

void Machine::Fail(const char* kind, const Site& site, std::string message) {
  faults.push_back({kind, std::move(message), site});
  throw Stop{};
}

std::string Machine::NameAgent(const Access& access, const Cluster& cluster) const {
  const uint32_t threads = static_cast<uint32_t>((options_.block.count() + 31) / 32 * 32);
  const int line = program_.instructions[access.pc()].line;
  if (access.cluster != cluster.number) return Text("line %d in another cluster", line);
  const uint32_t ctas = static_cast<uint32_t>(cluster.ctas.size());
  if (access.base < ctas * threads) {
    const Dim3 id = cluster.ctas[access.base / threads]->id;
    return Text("line %d, CTA (%u, %u, %u) warp %u lanes %#010x", line, id.x, id.y, id.z, access.base % threads / 32,
                access.lanes);
  }
  return Text(access.has(kAsync) ? "the asynchronous operation of line %d" : "a warp at line %d", line);
}

void Machine::Race(const char* space, const Site& site, const Access& before, bool before_writes, bool now_writes,
                   uint64_t offset, const Cluster& cluster, const std::string& where) {
  if (reported_races_[{before.pc(), site.pc}]++ > 0) return;
  faults.push_back({"race",
                    Text("%s, byte %llu%s%s: this %s and an earlier %s are not ordered. The earlier one: %s `%s`", space,
                         static_cast<unsigned long long>(offset), where.empty() ? "" : " of ", where.c_str(),
                         now_writes ? "write" : "read", before_writes ? "write" : "read",
                         NameAgent(before, cluster).c_str(), before.has(kAsync) ? "asynchronous proxy" : "generic proxy"),
                    site});
  if (static_cast<int>(faults.size()) >= options_.max_faults) throw Stop{};
}

void Machine::StartCluster() {
  const Dim3 id = waiting_.front();
  waiting_.pop_front();
  auto cluster = std::make_unique<Cluster>();
  cluster->number = started_++;
  cluster->id = id;
  const uint32_t ctas = static_cast<uint32_t>(options_.cluster.count());
  const uint32_t threads = static_cast<uint32_t>(options_.block.count()), warps = (threads + 31) / 32;
  const uint32_t padded_warps = (warps + 3) / 4 * 4;
  const uint32_t first_wgmma = ctas * warps * 32, first_tensor = first_wgmma + ctas * padded_warps;
  cluster->first_slot = first_tensor + ctas;
  cluster->first_wide_slot = cluster->first_slot + static_cast<uint32_t>(cluster->slot_clocks.size());
  const bool stores = std::any_of(program_.instructions.begin(), program_.instructions.end(),
                                  [](const Instr& instr) { return instr.op() == Op::st_async; });
  cluster->agents = cluster->first_wide_slot + (stores ? Cluster::kWideSlots * 32 : 0);
  cluster->queues.resize(ctas);
  if (options_.races) {
    cluster->barrier_current.Resize(cluster->agents);
    cluster->barrier_complete.Resize(cluster->agents);
  }
  const uint32_t shared_end = kReservedShared + options_.shared_bytes;
  for (uint32_t rank = 0; rank < ctas; ++rank) {
    auto cta = std::make_unique<Cta>();
    cta->cluster = cluster.get();
    cta->rank = rank;
    const Dim3 within{rank % options_.cluster.x, rank / options_.cluster.x % options_.cluster.y,
                      rank / (options_.cluster.x * options_.cluster.y)};
    cta->id = {id.x * options_.cluster.x + within.x, id.y * options_.cluster.y + within.y,
               id.z * options_.cluster.z + within.z};
    cta->shared.assign(shared_end + 64, 0xcd);
    cta->shared_written.assign(shared_end + 64, 0);
    cta->barrier_words.assign(shared_end / 8 + 8, 0);
    cta->tensor_agent = first_tensor + rank;
    if (options_.races) {
      cta->shadow = std::make_unique<Shadow>(shared_end + 64);
      for (NamedBarrier& barrier : cta->named) {
        barrier.current.Resize(cluster->agents);
        barrier.complete.Resize(cluster->agents);
      }
    }
    if (options_.timeline) {
      cta->timeline = std::make_unique<CtaTimeline>();
      cta->timeline->id = cta->id;
      cta->timeline->start = now_;
      for (int i = 0; i < 4; ++i) cta->timeline->schedulers[i] = cta->timeline->tensor_cores[i] = now_;
      cta->timeline->memory = cta->timeline->stores = now_;
      cta->timeline->waits.resize(warps);
      cta->timeline->issued.resize(warps);
      cta->timeline->ends.resize(warps);
    }
    cta->warps.resize(warps);
    for (uint32_t w = 0; w < warps; ++w) {
      Warp& warp = cta->warps[w];
      warp.cta = cta.get();
      warp.id = static_cast<int>(w);
      const uint32_t lanes = std::min(32u, threads - 32 * w);
      warp.live = lanes == 32 ? ~0u : (1u << lanes) - 1;
      warp.fragments.push_back({0, warp.live, {}, false});
      warp.time = now_;
      warp.register_count = options_.registers;
      warp.agent = (rank * warps + w) * 32;
      warp.wgmma_agent = first_wgmma + rank * padded_warps + w;
      warp.register_memory.assign(static_cast<size_t>(program_.register_bytes) + 64, 0);
      warp.registers = warp.register_memory.data() + (64 - reinterpret_cast<uintptr_t>(warp.register_memory.data()) % 64);
      if (options_.races) {
        warp.lanes.resize(32);
        for (uint32_t l = 0; l < 32; ++l) {
          warp.lanes[l].Resize(cluster->agents);
          warp.lanes[l].seen[warp.agent + l] = 1;
        }
      }
      InitRegisters(warp);
    }
    cluster->ctas.push_back(std::move(cta));
  }
  clusters_.push_back(std::move(cluster));
}

void Machine::InitRegisters(Warp& warp) {
  const Cta& cta = *warp.cta;
  const Dim3 &block = options_.block, &grid = options_.grid, &cluster = options_.cluster;
  for (const SpecialRegister& special : program_.specials) {
    for (uint32_t l = 0; l < 32; ++l) {
      const uint32_t thread = static_cast<uint32_t>(warp.id) * 32 + l;
      uint64_t value = 0;
      switch (static_cast<Special>(special.number)) {
        case Special::tid_x: value = thread % block.x; break;
        case Special::tid_y: value = thread / block.x % block.y; break;
        case Special::tid_z: value = thread / (block.x * block.y); break;
        case Special::ntid_x: value = block.x; break;
        case Special::ntid_y: value = block.y; break;
        case Special::ntid_z: value = block.z; break;
        case Special::ctaid_x: value = cta.id.x; break;
        case Special::ctaid_y: value = cta.id.y; break;
        case Special::ctaid_z: value = cta.id.z; break;
        case Special::nctaid_x: value = grid.x; break;
        case Special::nctaid_y: value = grid.y; break;
        case Special::nctaid_z: value = grid.z; break;
        case Special::cluster_ctarank: value = cta.rank; break;
        case Special::cluster_nctarank: value = cluster.count(); break;
        case Special::cluster_ctaid_x: value = cta.id.x % cluster.x; break;
        case Special::cluster_ctaid_y: value = cta.id.y % cluster.y; break;
        case Special::cluster_ctaid_z: value = cta.id.z % cluster.z; break;
        case Special::cluster_nctaid_x: value = cluster.x; break;
        case Special::cluster_nctaid_y: value = cluster.y; break;
        case Special::cluster_nctaid_z: value = cluster.z; break;
        case Special::clusterid_x: value = cta.id.x / cluster.x; break;
        case Special::clusterid_y: value = cta.id.y / cluster.y; break;
        case Special::clusterid_z: value = cta.id.z / cluster.z; break;
        case Special::nclusterid_x: value = grid.x / cluster.x; break;
        case Special::nclusterid_y: value = grid.y / cluster.y; break;
        case Special::nclusterid_z: value = grid.z / cluster.z; break;
        case Special::laneid: value = l; break;
        case Special::warpid: value = static_cast<uint64_t>(warp.id); break;
        case Special::smid: value = cta.cluster->number; break;
        case Special::nsmid: value = 132; break;
        case Special::lanemask_lt: value = (1u << l) - 1; break;
        case Special::lanemask_le: value = (2u << l) - 1; break;
        case Special::lanemask_gt: value = ~((2u << l) - 1); break;
        case Special::lanemask_ge: value = ~((1u << l) - 1); break;
        case Special::lanemask_eq: value = 1u << l; break;
        case Special::clock: value = 0; break;
        case Special::shared_base: value = cta.rank << kRankShift | kReservedShared; break;
        case Special::dynamic_smem_size: value = options_.shared_bytes - program_.static_shared; break;
        case Special::total_smem_size: value = options_.shared_bytes; break;
      }
      uint8_t* to = warp.registers + special.place;
      if (special.bits == 64) {
        std::memcpy(to + 8 * l, &value, 8);
      } else {
        std::memcpy(to + 4 * l, &value, 4);
      }
    }
  }
}

bool Machine::Ready(Warp& warp, const Fragment& fragment) {
  const Wait& wait = fragment.wait;
  switch (wait.kind) {
    case Wait::kNothing: return true;
    case Wait::kMbarrier: return (wait.cta->barriers.at(wait.number).phase & 1) != wait.value;
    case Wait::kNamedBarrier: return wait.cta->named[wait.number].generation != wait.value;
    case Wait::kClusterBarrier: return warp.cta->cluster->generation != wait.value;
    case Wait::kLanes: return (wait.number & warp.live & ~fragment.mask) == 0;
    case Wait::kRegisters: return wait.cta->free_registers >= wait.number;
    case Wait::kPeer: return wait.cta->tmem->pair_requests >= wait.value;
    case Wait::kTmem: {
      const Tmem& tmem = *wait.cta->tmem;
      for (uint32_t base = 0; base + wait.number <= 512; base += wait.number) {
        bool free = true;
        for (uint32_t c = base; c < base + wait.number; ++c) free &= !tmem.allocated[c];
        if (free) return true;
      }
      return false;
    }
    case Wait::kBulkGroups: {
      uint32_t newer = 0;
      for (auto group = warp.groups.rbegin(); group != warp.groups.rend(); ++group) {
        if (!(group->lanes & fragment.mask) || newer++ < wait.number) continue;
        for (const auto& op : group->ops) {
          if (!(wait.value ? op->read : op->done)) return false;
        }
      }
      return true;
    }
  }
  return false;
}

// The ready group that is furthest behind: lanes come together again where they can.
Fragment* Machine::PickFragment(Warp& warp) {
  Fragment* best = nullptr;
  for (Fragment& fragment : warp.fragments) {
    if ((best == nullptr || fragment.pc < best->pc) && Ready(warp, fragment)) best = &fragment;
  }
  return best;
}

void Machine::MergeFragments(Warp& warp) {
  std::vector<Fragment>& fragments = warp.fragments;
  const auto free = [](const Fragment& fragment) {
    return !fragment.arrived && (fragment.wait.kind == Wait::kNothing || fragment.wait.kind == Wait::kLanes);
  };
  for (size_t a = 0; a < fragments.size(); ++a) {
    for (size_t b = a + 1; b < fragments.size();) {
      if (fragments[a].pc == fragments[b].pc && free(fragments[a]) && free(fragments[b])) {
        fragments[a].mask |= fragments[b].mask;
        fragments[a].wait = Wait{};
        fragments.erase(fragments.begin() + static_cast<ptrdiff_t>(b));
      } else {
        ++b;
      }
    }
  }
}

void Machine::RunWarp(Warp& warp, int quantum) {
  while (quantum-- > 0) {
    Fragment* fragment = warp.fragments.size() == 1 && warp.fragments[0].wait.kind == Wait::kNothing
                             ? &warp.fragments[0]
                             : PickFragment(warp);
    if (fragment == nullptr) return;
    fragment->wait.kind = Wait::kNothing;
    now_ = warp.time;
    if (fragment->pc >= program_.instructions.size()) {  // the end of the text is a return
      warp.live &= ~fragment->mask;
      warp.fragments.erase(warp.fragments.begin() + (fragment - warp.fragments.data()));
      ++progress_;
      if (warp.done()) return FinishWarp(warp);
      continue;
    }
    const Instr& instr = program_.instructions[fragment->pc];
    uint32_t mask = fragment->mask;
    if (instr.guard >= 0) {
      const uint32_t guard = *reinterpret_cast<const uint32_t*>(warp.registers + instr.guard);
      mask &= instr.guard_negated ? ~guard : guard;
    }
    ++instructions;
    ++executed[fragment->pc];
    if (options_.timeline) {
      Spend(warp, instr);
      now_ = warp.time;
    }
    if (instr.op() == Op::bra) {
      const uint32_t rest = fragment->mask & ~mask;
      if (mask == 0) {
        ++fragment->pc;
      } else if (rest == 0) {
        fragment->pc = static_cast<uint32_t>(instr.target);
      } else {
        const uint32_t next = fragment->pc + 1;
        fragment->pc = static_cast<uint32_t>(instr.target);
        fragment->mask = mask;
        warp.fragments.push_back({next, rest, {}, false});
      }
      if (warp.fragments.size() > 1) MergeFragments(warp);
      continue;
    }
    if (instr.op() == Op::ret) {
      warp.live &= ~mask;
      fragment->mask &= ~mask;
      ++fragment->pc;
      ++progress_;
      if (fragment->mask == 0) warp.fragments.erase(warp.fragments.begin() + (fragment - warp.fragments.data()));
      if (warp.done()) return FinishWarp(warp);
      continue;
    }
    if (mask != 0) {
      Context context{warp, *fragment, instr, program_.operands.data() + instr.first, mask};
      if (Execute(context) == Step::kBlocked) {
        --instructions;
        --executed[fragment->pc];
        if (fragment->blocked_since < 0) fragment->blocked_since = now_;
        if (warp.fragments.size() > 1) MergeFragments(warp);
        if (PickFragment(warp) == nullptr) return;
        continue;
      }
    }
    if (options_.timeline && fragment->blocked_since >= 0) {
      if (warp.time > fragment->blocked_since) {
        WaitInterval wait;
        wait.start = fragment->blocked_since;
        wait.end = warp.time;
        wait.pc = fragment->pc;
        warp.cta->timeline->waits[static_cast<size_t>(warp.id)].push_back(wait);
      }
      fragment->blocked_since = -1;
    }
    ++fragment->pc;
    if (warp.fragments.size() > 1) MergeFragments(warp);
  }
}

// The time of an instruction: its scheduler's turn, and what the warp's next instruction waits for.
void Machine::Spend(Warp& warp, const Instr& instr) {
  CtaTimeline& cta = *warp.cta->timeline;
  double& scheduler = cta.schedulers[warp.id % 4];
  const double issue = std::max(warp.time, scheduler);
  scheduler = issue + 1;
  double latency = costs.instruction;
  switch (instr.op()) {
    case Op::ld:
      latency = instr.space() == Space::shared  ? costs.shared_load
                : instr.space() == Space::param ? costs.instruction
                                                : costs.global_load;
      break;
    case Op::shfl:
    case Op::vote: latency = costs.shuffle; break;
    case Op::tc_ld: latency = costs.shared_load; break;
    case Op::st:
      if (instr.space() == Space::global) {
        const double bytes = 32.0 * instr.bits / 8 * instr.count;
        cta.memory = std::max(cta.memory, issue) + bytes / costs.memory_bytes;
      }
      break;
    default: break;
  }
  warp.time = issue + latency;
  cta.issued[static_cast<size_t>(warp.id)] += latency;
}

// When a bulk load that starts now has come.
double Machine::LoadReady(Cta& cta, uint64_t bytes, uint64_t address) {
  if (!options_.timeline) return 0;
  CtaTimeline& timeline = *cta.timeline;
  const double rate = fetched_.insert(address).second ? costs.memory_bytes : costs.l2_bytes;
  timeline.memory = std::max(timeline.memory, now_) + static_cast<double>(bytes) / rate;
  const double ready = std::max(timeline.memory, now_) + costs.tma_latency;
  timeline.in_flight.emplace_back(now_, static_cast<int64_t>(bytes));
  timeline.in_flight.emplace_back(ready, -static_cast<int64_t>(bytes));
  return ready;
}

// When a bulk store that starts now has read shared memory. It also takes its share of memory.
double Machine::StoreReady(Cta& cta, uint64_t bytes) {
  if (!options_.timeline) return 0;
  CtaTimeline& timeline = *cta.timeline;
  timeline.memory = std::max(timeline.memory, now_) + static_cast<double>(bytes) / costs.memory_bytes;
  timeline.stores = std::max(timeline.stores, now_) + static_cast<double>(bytes) / costs.shared_bytes;
  return timeline.stores + costs.store_latency;
}

double Machine::TensorReady(Cta& cta, int core, double products, double rate, double earliest) {
  CtaTimeline& timeline = *cta.timeline;
  const double start = std::max(timeline.tensor_cores[core], earliest), end = start + products / rate;
  timeline.tensor_cores[core] = end;
  timeline.TensorBusy(start, end);
  return end;
}

// Runs one asynchronous operation, if there is one.
bool Machine::RunAsync(Cluster& cluster) {
  size_t choices = cluster.tasks.size();
  for (const auto& queue : cluster.queues) choices += !queue.empty();
  std::vector<Warp*> multiplying;
  for (const auto& cta : cluster.ctas) {
    for (Warp& warp : cta->warps) {
      if (!warp.products.empty()) multiplying.push_back(&warp);
    }
  }
  choices += multiplying.size();
  if (choices == 0) return false;
  size_t pick = random_.Below(static_cast<uint32_t>(choices));
  if (pick < cluster.tasks.size()) {
    Task task = std::move(cluster.tasks[pick]);
    cluster.tasks[pick] = std::move(cluster.tasks.back());
    cluster.tasks.pop_back();
    task.run();
    return true;
  }
  pick -= cluster.tasks.size();
  for (auto& queue : cluster.queues) {
    if (queue.empty()) continue;
    if (pick-- == 0) {
      Task task = std::move(queue.front());
      queue.pop_front();
      task.run();
      return true;
    }
  }
  WgmmaExecute(*multiplying[pick]);
  return true;
}

// What a warp must not leave behind.
void Machine::FinishWarp(Warp& warp) {
  const auto check = [&](const BulkGroup& group) {
    for (const auto& op : group.ops) {
      if (op->waited) continue;
      Fail("protocol", Here(warp, op->pc, group.lanes),
           "the thread ends, and has not waited until this copy has read shared memory (cp.async.bulk.wait_group.read)");
    }
  };
  for (const BulkGroup& group : warp.groups) check(group);
  check(warp.open_group);
  if (warp.early) Fail("protocol", warp.early_site, "an accumulator is used, and no wgmma.wait_group follows");
}

void Machine::FinishCluster(Cluster& cluster) {
  while (RunAsync(cluster)) {
  }
  for (const auto& cta : cluster.ctas) {
    for (const auto& [offset, barrier] : cta->barriers) {
      if (!barrier.live || barrier.bytes == 0) continue;
      Fail("barrier", {barrier.init.pc(), cta->id, -1, 0},
           Text("at the end of the CTA %lld bytes are still expected by the mbarrier at byte %u; events:%s",
                static_cast<long long>(barrier.bytes), offset - kReservedShared, History(barrier).c_str()));
    }
    if (cta->tmem != nullptr && !cta->tmem->allocations.empty()) {
      Fail("protocol", {static_cast<uint32_t>(program_.instructions.size() - 1), cta->id, -1, 0},
           Text("%u columns of TMEM are still allocated at the end of the CTA",
                cta->tmem->allocations.begin()->second));
    }
  }
}

std::string Machine::Describe(Warp& warp, const Fragment& fragment) {
  const Dim3 id = warp.cta->id;
  std::string text = Text("\n  CTA (%u, %u, %u) warp %d lanes %#010x at line %d waits for ", id.x, id.y, id.z, warp.id,
                          fragment.mask, program_.instructions[fragment.pc].line);
  const Wait& wait = fragment.wait;
  switch (wait.kind) {
    case Wait::kMbarrier: {
      const Mbarrier& barrier = wait.cta->barriers.at(wait.number);
      text += Text("parity %llu of the mbarrier at byte %u of CTA rank %u: phase %u lacks %lld of %u arrivals and %lld "
                   "bytes; events:%s",
                   static_cast<unsigned long long>(wait.value), wait.number - kReservedShared, wait.cta->rank,
                   barrier.phase, static_cast<long long>(barrier.pending), barrier.expected,
                   static_cast<long long>(barrier.bytes), History(barrier).c_str());
      break;
    }
    case Wait::kNamedBarrier: {
      const NamedBarrier& barrier = wait.cta->named[wait.number];
      text += Text("named barrier %u: %u of %u threads are there", wait.number, barrier.arrived, barrier.expected);
      break;
    }
    case Wait::kClusterBarrier: text += "the cluster's barrier"; break;
    case Wait::kBulkGroups: text += "bulk copies"; break;
    case Wait::kLanes: text += Text("lanes %#010x of its warp", wait.number & warp.live & ~fragment.mask); break;
    case Wait::kTmem: text += Text("%u columns of TMEM", wait.number); break;
    case Wait::kPeer: text += "the other CTA of its pair to allocate TMEM"; break;
    case Wait::kRegisters: text += Text("%u registers, of which %u are free", wait.number, wait.cta->free_registers); break;
    case Wait::kNothing: text += "nothing"; break;
  }
  return text;
}

void Machine::Deadlock() {
  std::string text = "nothing can go on:";
  Site site;
  for (const auto& cluster : clusters_) {
    for (const auto& cta : cluster->ctas) {
      for (Warp& warp : cta->warps) {
        for (const Fragment& fragment : warp.fragments) {
          if (site.warp < 0) site = Here(warp, fragment.pc, fragment.mask);
          text += Describe(warp, fragment);
        }
      }
    }
  }
  Fail("deadlock", site, text);
}

// Starts clusters where there is room, and lets those go that are through. False where nothing is left.
bool Machine::StartOrFinish() {
  for (size_t i = 0; i < clusters_.size();) {
    bool alive = false;
    for (const auto& cta : clusters_[i]->ctas) {
      for (const Warp& warp : cta->warps) alive = alive || !warp.done();
    }
    if (alive) {
      ++i;
      continue;
    }
    FinishCluster(*clusters_[i]);
    for (const auto& cta : clusters_[i]->ctas) {
      if (cta->timeline == nullptr) continue;
      for (const Warp& warp : cta->warps) {
        cta->timeline->ends[static_cast<size_t>(warp.id)] = warp.time;
        cta->timeline->end = std::max(cta->timeline->end, warp.time);
      }
      now_ = cta->timeline->end;  // a cluster that takes this one's place begins here
      timelines.push_back(std::move(cta->timeline));
    }
    clusters_.erase(clusters_.begin() + static_cast<ptrdiff_t>(i));
  }
  while (!waiting_.empty() && clusters_.size() < static_cast<size_t>(options_.resident_clusters)) StartCluster();
  return !clusters_.empty();
}

void Machine::RunRandomly() {
  std::vector<Warp*> ready;
  while (StartOrFinish()) {
    ready.clear();
    for (const auto& cluster : clusters_) {
      for (const auto& cta : cluster->ctas) {
        for (Warp& warp : cta->warps) {
          if (!warp.done() && PickFragment(warp) != nullptr) ready.push_back(&warp);
        }
      }
    }
    // Asynchronous operations are late or early, at random.
    Cluster& cluster = *clusters_[random_.Below(static_cast<uint32_t>(clusters_.size()))];
    if (ready.empty()) {
      bool ran = false;
      for (const auto& other : clusters_) ran = ran || RunAsync(*other);
      if (!ran) Deadlock();
      continue;
    }
    if (random_.Below(8) < 3 && RunAsync(cluster)) continue;
    Warp& warp = *ready[random_.Below(static_cast<uint32_t>(ready.size()))];
    RunWarp(warp, 1 + static_cast<int>(random_.Below(128)));
    CheckLimit(warp);
  }
}

// Whatever is earliest runs next.
void Machine::RunByTime() {
  while (StartOrFinish()) {
    Warp* next = nullptr;
    for (const auto& cluster : clusters_) {
      for (const auto& cta : cluster->ctas) {
        for (Warp& warp : cta->warps) {
          if (!warp.done() && (next == nullptr || warp.time < next->time) && PickFragment(warp) != nullptr) next = &warp;
        }
      }
    }
    Cluster* of = nullptr;
    size_t task_at = 0;
    int queue_at = -1;
    double earliest = next == nullptr ? 1e300 : next->time;
    for (const auto& cluster : clusters_) {
      for (size_t t = 0; t < cluster->tasks.size(); ++t) {
        if (cluster->tasks[t].ready > earliest) continue;
        earliest = cluster->tasks[t].ready;
        of = cluster.get();
        task_at = t;
        queue_at = -1;
      }
      for (size_t q = 0; q < cluster->queues.size(); ++q) {
        if (cluster->queues[q].empty() || cluster->queues[q].front().ready > earliest) continue;
        earliest = cluster->queues[q].front().ready;
        of = cluster.get();
        queue_at = static_cast<int>(q);
      }
    }
    if (of != nullptr) {
      Task task;
      if (queue_at >= 0) {
        task = std::move(of->queues[static_cast<size_t>(queue_at)].front());
        of->queues[static_cast<size_t>(queue_at)].pop_front();
      } else {
        task = std::move(of->tasks[task_at]);
        of->tasks.erase(of->tasks.begin() + static_cast<ptrdiff_t>(task_at));
      }
      now_ = task.ready;
      task.run();
      continue;
    }
    if (next == nullptr) Deadlock();
    RunWarp(*next, 4);
    CheckLimit(*next);
  }
}

void Machine::CheckLimit(const Warp& warp) {
  if (instructions <= options_.max_instructions) return;
  const uint32_t pc = warp.done() ? 0 : warp.fragments[0].pc;
  Fail("limit", Here(warp, pc, 0),
       Text("more than %lld warp instructions", static_cast<long long>(options_.max_instructions)));
}

void Machine::Run() {
  try {
    if (options_.timeline) {
      RunByTime();
    } else {
      RunRandomly();
    }
  } catch (const Stop&) {
  }
}

}  // namespace ptx
