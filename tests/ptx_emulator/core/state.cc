// How clusters begin and end.
#include <algorithm>

#include "machine.h"

namespace ptx {

Machine::Machine(const Program& program, const Options& options, GlobalMemory& memory)
    : program_(program), options_(options), memory_(memory), random_(options.seed) {
  executed.assign(program.instructions.size(), 0);
  constants_ = program.constants;
  // Spaces that the same proxy fences are for share clocks.
  std::map<std::set<int32_t>, int> numbers;
  for (int space = 0; space < kSpaceClasses; ++space) {
    std::set<int32_t> fences;
    for (const Instr& instr : program.instructions) {
      if (instr.op() == Op::fence_proxy_async && instr.extra >> space & 1) fences.insert(instr.extra);
    }
    fence_of_[static_cast<size_t>(space)] =
        fences.empty() ? -1 : numbers.try_emplace(fences, static_cast<int>(numbers.size())).first->second;
  }
  fences_ = static_cast<int>(numbers.size());
  const bool non_coherent = std::any_of(program.instructions.begin(), program.instructions.end(),
                                        [](const Instr& instr) { return instr.has(k_nc); });
  const int of_global = fence_of_[kGlobalSpace];
  memory.ForEach([&](Buffer& buffer) {
    if (buffer.shadow != nullptr) buffer.shadow->SetFences(of_global, of_global);
    if (buffer.writable && non_coherent) buffer.coherence.assign(buffer.end - buffer.start, 0);
  });
  const Dim3 clusters{options.grid.x / options.cluster.x, options.grid.y / options.cluster.y,
                      options.grid.z / options.cluster.z};
  for (uint32_t z = 0; z < clusters.z; ++z) {
    for (uint32_t y = 0; y < clusters.y; ++y) {
      for (uint32_t x = 0; x < clusters.x; ++x) waiting_.push_back({x, y, z});
    }
  }
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
  cluster->first_begun = first_tensor + ctas;
  const uint32_t first_store = cluster->first_begun + ctas;
  const uint32_t first_used = first_store + (options_.blackwell ? ctas * warps : 0);
  cluster->used_shift = first_used - first_wgmma;
  cluster->first_slot = first_used + (options_.blackwell ? ctas * padded_warps : 0);
  cluster->first_wide_slot = cluster->first_slot + static_cast<uint32_t>(cluster->slot_clocks.size());
  const bool stores = std::any_of(program_.instructions.begin(), program_.instructions.end(),
                                  [](const Instr& instr) { return instr.op() == Op::st_async; });
  cluster->agents = cluster->first_wide_slot + (stores ? Cluster::kWideSlots * 32 : 0);
  cluster->queues.resize(ctas);
  if (options_.races) {
    cluster->barrier_current.Resize(cluster->agents, fences_);
    cluster->barrier_complete.Resize(cluster->agents, fences_);
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
    cta->first_agent = rank * warps * 32;
    cta->agents = warps * 32;
    if (options_.races) {
      cta->shadow = std::make_unique<Shadow>(shared_end + 64);
      cta->shadow->SetFences(fence_of_[kOwnShared], fence_of_[kOtherShared], cta->first_agent, cta->agents);
      cta->uses.resize(cluster->agents);
      for (NamedBarrier& barrier : cta->named) {
        barrier.current.Resize(cluster->agents, fences_);
        barrier.complete.Resize(cluster->agents, fences_);
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
      warp.store_agent = first_store + rank * warps + w;
      warp.register_memory.assign(static_cast<size_t>(program_.register_bytes) + 64, 0);
      warp.registers =
          warp.register_memory.data() + (64 - reinterpret_cast<uintptr_t>(warp.register_memory.data()) % 64);
      if (options_.races) {
        warp.lanes.resize(32);
        for (uint32_t l = 0; l < 32; ++l) {
          warp.lanes[l].Resize(cluster->agents, fences_);
          warp.lanes[l].seen[warp.agent + l] = 1;
          warp.lanes[l].Know(cluster->first_begun + rank, 1);
        }
      }
      warp.written.assign(static_cast<size_t>(program_.register_bytes) / 32, 0);
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
        case Special::tid_x:
          value = thread % block.x;
          break;
        case Special::tid_y:
          value = thread / block.x % block.y;
          break;
        case Special::tid_z:
          value = thread / (block.x * block.y);
          break;
        case Special::ntid_x:
          value = block.x;
          break;
        case Special::ntid_y:
          value = block.y;
          break;
        case Special::ntid_z:
          value = block.z;
          break;
        case Special::ctaid_x:
          value = cta.id.x;
          break;
        case Special::ctaid_y:
          value = cta.id.y;
          break;
        case Special::ctaid_z:
          value = cta.id.z;
          break;
        case Special::nctaid_x:
          value = grid.x;
          break;
        case Special::nctaid_y:
          value = grid.y;
          break;
        case Special::nctaid_z:
          value = grid.z;
          break;
        case Special::cluster_ctarank:
          value = cta.rank;
          break;
        case Special::cluster_nctarank:
          value = cluster.count();
          break;
        case Special::cluster_ctaid_x:
          value = cta.id.x % cluster.x;
          break;
        case Special::cluster_ctaid_y:
          value = cta.id.y % cluster.y;
          break;
        case Special::cluster_ctaid_z:
          value = cta.id.z % cluster.z;
          break;
        case Special::cluster_nctaid_x:
          value = cluster.x;
          break;
        case Special::cluster_nctaid_y:
          value = cluster.y;
          break;
        case Special::cluster_nctaid_z:
          value = cluster.z;
          break;
        case Special::clusterid_x:
          value = cta.id.x / cluster.x;
          break;
        case Special::clusterid_y:
          value = cta.id.y / cluster.y;
          break;
        case Special::clusterid_z:
          value = cta.id.z / cluster.z;
          break;
        case Special::nclusterid_x:
          value = grid.x / cluster.x;
          break;
        case Special::nclusterid_y:
          value = grid.y / cluster.y;
          break;
        case Special::nclusterid_z:
          value = grid.z / cluster.z;
          break;
        case Special::laneid:
          value = l;
          break;
        case Special::warpid:
          value = static_cast<uint64_t>(warp.id);
          break;
        case Special::smid:
          value = cta.cluster->number;
          break;
        case Special::nsmid:
          value = 132;
          break;
        case Special::lanemask_lt:
          value = (1u << l) - 1;
          break;
        case Special::lanemask_le:
          value = (2u << l) - 1;
          break;
        case Special::lanemask_gt:
          value = ~((2u << l) - 1);
          break;
        case Special::lanemask_ge:
          value = ~((1u << l) - 1);
          break;
        case Special::lanemask_eq:
          value = 1u << l;
          break;
        case Special::clock:
          value = 0;
          break;
        case Special::shared_base:
          value = cta.rank << kRankShift | kReservedShared;
          break;
        case Special::dynamic_smem_size:
          value = options_.shared_bytes - program_.static_shared;
          break;
        case Special::total_smem_size:
          value = options_.shared_bytes;
          break;
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

}  // namespace ptx
