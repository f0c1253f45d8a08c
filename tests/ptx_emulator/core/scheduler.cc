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
  cluster->agents = cluster->first_slot + static_cast<uint32_t>(cluster->slot_clocks.size());
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
    cta->warps.resize(warps);
    for (uint32_t w = 0; w < warps; ++w) {
      Warp& warp = cta->warps[w];
      warp.cta = cta.get();
      warp.id = static_cast<int>(w);
      const uint32_t lanes = std::min(32u, threads - 32 * w);
      warp.live = lanes == 32 ? ~0u : (1u << lanes) - 1;
      warp.fragments.push_back({0, warp.live, {}, false});
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
        if (warp.fragments.size() > 1) MergeFragments(warp);
        if (PickFragment(warp) == nullptr) return;
        continue;
      }
    }
    ++fragment->pc;
    if (warp.fragments.size() > 1) MergeFragments(warp);
  }
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

void Machine::Run() {
  // Parameters' addresses were put into the constants by the caller.
  std::vector<Warp*> ready;
  try {
    while (!waiting_.empty() || !clusters_.empty()) {
      while (!waiting_.empty() && clusters_.size() < static_cast<size_t>(options_.resident_clusters)) StartCluster();
      ready.clear();
      for (size_t i = 0; i < clusters_.size();) {
        bool alive = false;
        for (const auto& cta : clusters_[i]->ctas) {
          for (Warp& warp : cta->warps) {
            if (warp.done()) continue;
            alive = true;
            if (PickFragment(warp) != nullptr) ready.push_back(&warp);
          }
        }
        if (alive) {
          ++i;
          continue;
        }
        FinishCluster(*clusters_[i]);
        clusters_.erase(clusters_.begin() + static_cast<ptrdiff_t>(i));
      }
      if (clusters_.empty()) continue;
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
      if (instructions > options_.max_instructions) {
        const uint32_t pc = warp.done() ? 0 : warp.fragments[0].pc;
        Fail("limit", Here(warp, pc, 0), Text("more than %lld warp instructions", static_cast<long long>(options_.max_instructions)));
      }
    }
  } catch (const Stop&) {
  }
}

}  // namespace ptx
