// The state of a launch: clusters, CTAs, warps, barriers, and the asynchronous operations that are under way.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "clocks.h"
#include "faults.h"
#include "memory.h"
#include "program.h"
#include "shadow.h"
#include "timeline.h"

namespace ptx {

struct Cta;
struct Cluster;
struct Warp;

// What a group of lanes waits for.
struct Wait {
  enum Kind {
    kNothing,
    kMbarrier,
    kNamedBarrier,
    kClusterBarrier,
    kBulkGroups,
    kLanes,
    kTmem,
    kPeer,
    kRegisters
  } kind = kNothing;
  Cta* cta = nullptr;
  uint32_t number = 0;  // mbarrier offset, barrier id, groups that may be pending, lane mask, columns
  uint64_t value = 0;   // parity, generation, whether reading is enough
};

// Lanes of a warp that are at the same instruction.
struct Fragment {
  uint32_t pc = 0;
  uint32_t mask = 0;
  Wait wait;
  bool arrived = false;  // at the barrier that it waits for
  double blocked_since = -1;
};

struct BulkOp {
  bool read = false, done = false;
  bool waited = false;  // by its thread, for the reading at least
  double time = 0;
  uint32_t pc = 0;
  uint32_t agent = 0;
  uint32_t read_clock = 0, write_clock = 0;
};

struct BulkGroup {
  uint32_t lanes = 0;
  std::vector<std::shared_ptr<BulkOp>> ops;
};

// One matrix operand as float32, [k][row].
struct Tile {
  std::vector<float> values;
  std::vector<int32_t> exponents;  // for what needs them
};

struct WgmmaOp {
  uint32_t pc = 0;
  uint64_t a = 0, b = 0;
  bool accumulate = false;
  uint64_t serial = 0;  // among the products of its warpgroup
  std::shared_ptr<Clocks> clocks;
  uint32_t clock = 0;
};

struct SharedTile {
  uint32_t pc = 0;
  uint64_t a = 0, b = 0;
  bool loaded = false;
  int users = 0;
  Tile tile;
};

struct Warpgroup {
  std::map<uint64_t, SharedTile> tiles;  // B, by serial number of the product
};

struct Warp {
  Cta* cta = nullptr;
  int id = 0;
  uint32_t live = 0;  // lanes that have not exited
  std::vector<Fragment> fragments;
  uint8_t* registers = nullptr;
  std::vector<uint8_t> register_memory;
  uint32_t agent = 0;  // of lane 0
  uint32_t clock = 1;
  uint32_t register_count = 0;
  int failed_polls = 0;
  uint32_t apart = 0;        // instructions since all lanes were last together
  std::set<uint32_t> asked;  // waits at mbarriers that have answered too early once
  uint32_t polled_pc = 0;
  uint64_t polled_at = 0;
  std::vector<Clocks> lanes;
  std::vector<Clocks> fences;     // what thread fences have published, for relaxed arrivals and stores
  std::vector<Clocks> pending;    // what relaxed loads saw, for the next fence
  std::vector<uint32_t> written;  // lanes, by register: places in units of 32 bytes

  // Bulk copies.
  BulkGroup open_group;
  std::deque<BulkGroup> groups;

  // wgmma.
  std::deque<WgmmaOp> products;
  std::deque<uint64_t> product_groups;  // serial of the first product behind each group that is committed
  uint64_t issued = 0, executed = 0, committed = 0;
  bool fence_needed = true;
  std::vector<uint8_t> touched;  // since the last fence, accumulators by place in units of 32 bytes; empty for none
  struct InFlight {
    uint64_t serial;  // of the last product that writes them
    uint32_t pc;
    bool read = false;  // by a move
  };
  std::vector<InFlight> in_flight;     // accumulators that products may still write
  std::vector<InFlight> tmem_pending;  // accesses to TMEM that have not been waited for
  bool early = false;                  // one of them was used before its wait
  Site early_site;
  int early_line = 0;
  std::deque<double> product_ends;  // when each group that is committed is complete
  double product_end = 0;
  uint32_t wgmma_agent = 0;  // of its products, or of its loads from TMEM
  uint32_t store_agent = 0;  // of its stores to TMEM

  // Named barriers that some of its lanes are at, one after the other.
  struct Arrival {
    uint32_t id, lanes, expected;
    bool of_all;
    Site site;
  };
  std::vector<Arrival> arrivals;

  // Cluster barrier.
  uint64_t cluster_generation = 0;
  bool cluster_arrived = false;
  bool reported_done = false;

  struct Request {
    uint32_t pc, registers;
  };
  std::vector<Request> requests;  // setmaxnreg

  double time = 0;  // timeline mode; also where else there is a time

  bool done() const { return fragments.empty(); }
};

struct BarrierEvent {
  const char* what = "";
  uint32_t pc = 0;
  Dim3 cta;
  int warp = 0;
  int64_t value = 0;
  uint32_t phase = 0;
  int times = 1;
};

// The last use of an mbarrier by an agent.
struct BarrierUse {
  uint32_t clock = 0;
  uint32_t pc = 0;
  int64_t released_by = -1;  // the phase of an arrival that releases nothing
};

struct Mbarrier {
  bool live = false;
  uint32_t expected = 0;
  int64_t pending = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;  // phases that are complete
  Clocks current, complete;
  std::vector<uint32_t> previous;  // what was known when the phase before the last was complete
  Access init;
  bool init_fenced = false;
  Access relaxed;  // the last arrival by another CTA that releases nothing, and its phase
  uint32_t relaxed_phase = 0;
  std::vector<int64_t> observed;  // by thread of the cluster: last phase that it waited for
  std::vector<BarrierUse> uses;   // by agent
  std::deque<BarrierEvent> events;
  double time = 0;
};

struct NamedBarrier {
  uint32_t arrived = 0, expected = 0;
  bool of_all = false;  // for all threads of the CTA that have not ended
  uint64_t generation = 0;
  Site last;  // arrival
  Clocks current, complete;
  double time = 0;
};

// TMEM: 128 lanes by 512 columns of 32 bits.
struct Tmem {
  std::vector<uint32_t> words = std::vector<uint32_t>(128 * 512, 0xdeadbeef);  // [lane][column]
  std::vector<uint8_t> written = std::vector<uint8_t>(128 * 512, 0);
  std::array<bool, 512> allocated{};
  std::map<uint32_t, uint32_t> allocations;  // first column to columns
  bool relinquished = false;
  int group = 0;  // cta_group of the kernel's tcgen05 instructions
  uint32_t smallest = 512;
  std::unique_ptr<Shadow> shadow;  // 16 lanes of a column are one word; [column][lane / 16]
  uint64_t pair_requests = 0;      // allocations of a pair that this CTA has asked for
  uint64_t pair_grants = 0;
  std::deque<uint32_t> granted;
};

struct Cta {
  Cluster* cluster = nullptr;
  uint32_t rank = 0;
  Dim3 id;
  std::vector<uint8_t> shared, shared_written;  // from the start of the window
  std::unique_ptr<Shadow> shadow;
  bool ended = false;                    // all threads have; shared memory is gone
  bool refused = false;                  // has seen that no cluster is left to take
  uint32_t first_agent = 0, agents = 0;  // its threads
  Access last_use;
  std::vector<Access> uses;  // by agent: the last access to shared memory by others than its threads
  std::unordered_map<uint32_t, Mbarrier> barriers;
  std::vector<uint8_t> barrier_words;  // 1 where an mbarrier is, by 8 bytes of the window
  std::array<NamedBarrier, 16> named;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  std::unique_ptr<Tmem> tmem;
  uint32_t free_registers = 0;
  std::unique_ptr<CtaTimeline> timeline;
  uint32_t tensor_agent = 0;
  uint32_t tensor_clock = 0;
};

// An asynchronous operation. Those of a queue run in order, others in any.
struct Task {
  std::function<void()> run;
  Site site;
  double ready = 0;  // timeline mode
};

struct Cluster {
  uint16_t number = 0;
  Dim3 id;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<Task> tasks;
  std::vector<std::deque<Task>> queues;  // tensor cores, by CTA
  uint32_t agents = 0;
  uint32_t used_shift = 0;   // from a warp's agent of loads from TMEM to that of loads whose registers were used
  uint32_t first_begun = 0;  // by rank: who knows of it knows that the CTA has begun
  uint32_t first_slot = 0;
  std::array<uint32_t, 64> slot_clocks{};
  uint32_t next_slot = 0;
  // Agents for the lanes of asynchronous stores, where there are such.
  static constexpr uint32_t kWideSlots = 8;
  uint32_t first_wide_slot = 0, next_wide_slot = 0;
  std::array<uint32_t, kWideSlots> wide_slot_clocks{};
  uint64_t generation = 0;
  uint32_t arrived_warps = 0;
  std::unordered_map<uint64_t, Clocks> published;  // by address: what releases have stored there
  Clocks barrier_current, barrier_complete;
  double time = 0;
};

struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15ull + 0x1234567) {}
  uint64_t Next() {  // splitmix64
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  uint32_t Below(uint32_t n) { return static_cast<uint32_t>((Next() >> 32) * n >> 32); }
};

struct TensorMap;

enum class Step { kNext, kBlocked };

class Machine {
 public:
  Machine(const Program& program, const Options& options, GlobalMemory& memory);
  void Run();
  const Program& program() const { return program_; }

  std::vector<Fault> faults;
  std::vector<Fault> warnings;
  std::vector<int64_t> executed;  // by instruction
  int64_t instructions = 0;
  std::vector<std::unique_ptr<CtaTimeline>> timelines;
  Costs costs;

 private:
  // ---- scheduler.cc ----
  void StartCluster();
  void InitRegisters(Warp& warp);
  bool Ready(Warp& warp, const Fragment& fragment);
  Fragment* PickFragment(Warp& warp);
  void RunWarp(Warp& warp, int quantum);
  bool RunAsync(Cluster& cluster);
  void MergeFragments(Warp& warp);
  void RunRandomly();
  void RunByTime();
  bool StartOrFinish();
  void CheckLimit(const Warp& warp);
  void Spend(Warp& warp, const Instr& instr);
  double LoadCycles(uint64_t bytes, uint64_t address);
  double LoadReady(Cta& cta, uint64_t bytes, double cycles);
  double StoreReady(Cta& cta, uint64_t bytes);
  double TensorReady(Cta& cta, int core, double products, double rate, double earliest);
  [[noreturn]] void Deadlock();
  std::string Describe(Warp& warp, const Fragment& fragment);

  // ---- lifetime.cc: what must be over when something ends ----
  void FinishWarp(Warp& warp);
  void FinishCta(Cta& cta);
  void CheckWarpgroups(const Cta& cta);
  void FinishCluster(Cluster& cluster);
  void Use(const Site& site, Cta& cta, const Actor& actor) {
    if (cta.ended || actor.access.base - cta.first_agent >= cta.agents) NoteUse(site, cta, actor);
  }
  void NoteUse(const Site& site, Cta& cta, const Actor& actor);

  // ---- faults ----
  Site Here(const Warp& warp, uint32_t pc, uint32_t lanes) const { return {pc, warp.cta->id, warp.id, lanes}; }
  [[noreturn]] void Fail(const char* kind, const Site& site, std::string message);
  void Race(const char* space, const Site& site, const Access& before, bool before_writes, bool now_writes,
            uint64_t offset, const Cluster& cluster, const std::string& where);
  std::string NameAgent(const Access& access, const Cluster& cluster) const;

  // ---- execute.cc: everything that stays within a warp ----
  struct Context {
    Warp& warp;
    Fragment& fragment;
    const Instr& instr;
    const Operand* operands;
    uint32_t mask;
    Site site(const Machine& m) const { return m.Here(warp, fragment.pc, mask); }
  };
  Step Execute(Context& c);
  Step SetRegisters(Context& c);
  void Alu(Context& c);
  void FloatWithModifiers(Context& c);

  // ---- convert.cc ----
  void Convert(Context& c);
  void ConvertPairs(Context& c);
  uint64_t ConvertNumber(const Instr& i, uint64_t raw);
  void TrackRegisters(Context& c);

  // ---- warp_sync.cc ----
  bool Converged(Context& c, uint32_t members);
  bool MembersMeet(Context& c, int operand);
  void Shuffle(Context& c);
  void VoteAll(Context& c);
  void Elect(Context& c);
  void SyncWarp(Context& c);

  template <typename T>
  T* Destination(const Context& c, int i) {
    const Operand& o = c.operands[i];
    return reinterpret_cast<T*>(o.kind == kSink ? scratch_ : c.warp.registers + o.place);
  }
  template <typename T>
  const T* Source(const Context& c, int i) const {
    const Operand& o = c.operands[i];
    const uint8_t* base = o.kind == kConstant || o.kind == kConstantAddress ? constants_.data() : c.warp.registers;
    return reinterpret_cast<const T*>(base + o.place);
  }
  uint64_t Value(const Context& c, int i, int lane) const {
    const Operand& o = c.operands[i];
    if (o.bits == 1) return *Source<uint32_t>(c, i) >> lane & 1;
    return o.bits >= 64 ? Source<uint64_t>(c, i)[lane] : Source<uint32_t>(c, i)[lane];
  }
  uint64_t Address(const Context& c, int i, int lane) const {
    return Value(c, i, lane) + static_cast<uint64_t>(c.operands[i].addend);
  }
  void Put(const Context& c, int i, int lane, uint64_t value) {
    const Operand& o = c.operands[i];
    if (o.kind == kSink) return;
    if (o.bits == 1) {
      uint32_t& mask = *Destination<uint32_t>(c, i);
      mask = (mask & ~(1u << lane)) | static_cast<uint32_t>(value & 1) << lane;
    } else if (o.bits >= 64) {
      Destination<uint64_t>(c, i)[lane] = value;
    } else {
      Destination<uint32_t>(c, i)[lane] = static_cast<uint32_t>(value);
    }
  }

  // ---- spaces.cc: loads and stores ----
  struct SharedPlace {
    Cta* cta;
    uint32_t offset;
  };
  SharedPlace Shared(const Site& site, Cluster& cluster, uint32_t address, uint64_t bytes, uint32_t align);
  void CheckWindow(const Context& c, const Site& site, const SharedPlace& place);
  void ReadShared(const Site& site, Cta& cta, uint32_t offset, uint32_t bytes, const Actor& actor, void* to);
  void WriteShared(const Site& site, Cta& cta, uint32_t offset, uint32_t bytes, const Actor& actor, const void* from);
  void ReadGlobal(const Site& site, Cluster& cluster, uint64_t address, uint64_t bytes, const Actor& actor, void* to);
  void WriteGlobal(const Site& site, Cluster& cluster, uint64_t address, uint64_t bytes, const Actor& actor,
                   const void* from);
  void MarkCoherence(const Site& site, Buffer& buffer, uint64_t offset, uint64_t bytes, uint8_t how);
  bool StoresAlike(const Context& c) const;
  void LoadStore(Context& c);
  void Matrix(Context& c);
  Actor LaneActor(const Context& c, int lane, uint32_t flags = 0) const;
  Space Resolve(const Context& c, uint64_t& address) const;

  // ---- atomics.cc ----
  void AtomicOp(Context& c);
  void Publish(Context& c, uint32_t lanes, uint64_t address, bool keeps);
  void Observe(Context& c, int lane, uint64_t address);
  uint64_t PlaceOf(const Context& c, uint64_t address) const;

  // ---- sync.cc: barriers, fences, clocks ----
  void Release(Warp& warp, uint32_t lanes, Clocks& to);
  void Tick(Warp& warp);
  void Acquire(Warp& warp, uint32_t lanes, const Clocks& from);
  void TellBegun(const Cluster& cluster, const Clocks& from, Clocks& to) const;
  void CheckBegun(const Site& site, const Cta& cta, const Clocks& clocks);
  Mbarrier& Barrier(const Site& site, Cluster& cluster, uint32_t address, SharedPlace* place);
  void CheckBarrierUse(const Site& site, Mbarrier& barrier, const Clocks& clocks, bool async, uint32_t offset);
  void CheckBarrierEnd(const Site& site, const Mbarrier& barrier, const Clocks& clocks, const Cluster& cluster,
                       uint32_t offset);
  void Arrive(const Site& site, Mbarrier& barrier, uint32_t count, uint32_t offset);
  void CompleteBytes(const Site& site, Mbarrier& barrier, int64_t bytes, uint32_t offset);
  void FinishClusterPhase(Cluster& cluster);
  void FinishNamedPhase(NamedBarrier& barrier);
  void FinishPhase(const Site& site, Mbarrier& barrier, uint32_t offset);
  void Note(Mbarrier& barrier, const char* what, const Site& site, int64_t value);
  std::string History(const Mbarrier& barrier) const;
  void MbarrierInit(Context& c);
  void MbarrierArrive(Context& c);
  Step MbarrierWait(Context& c);
  bool AsksTooEarly(Context& c, uint32_t passed);
  Step BarSync(Context& c, bool waits);
  void ArriveNamed(Warp& warp, const Warp::Arrival& arrival);
  void ArriveWithout(Warp& warp);
  void ClusterArrive(Context& c);
  Step ClusterWait(Context& c);
  void FenceAsync(Context& c);
  void FenceMbarrierInit(Context& c);
  void FenceThread(Context& c);

  // ---- tma.cc: bulk copies and tensor maps ----
  struct AsyncOp {
    std::shared_ptr<Clocks> clocks;
    uint32_t agent = 0;
    uint32_t clock = 0;
    uint32_t thread = 0;  // agent that issued it
    uint16_t cluster = 0;
  };
  void Signal(Mbarrier& barrier, const AsyncOp& op);
  Mbarrier& AsyncBarrier(const Site& site, Cluster& cluster, uint32_t address, const AsyncOp& op, SharedPlace* place);
  void Complete(const Site& site, Cluster& cluster, uint32_t address, const AsyncOp& op, int64_t bytes);
  AsyncOp StartAsync(Context& c, int lane);
  AsyncOp StartTensor(Context& c, int lane);
  Actor AsyncActor(const AsyncOp& op, uint32_t pc, bool second, uint32_t flags = 0) const;
  void TmaLoad(Context& c);
  void TmaStore(Context& c);
  void StoreAsync(Context& c);
  void BulkLoad(Context& c);
  void BulkStore(Context& c);
  void BulkCommit(Context& c);
  Step BulkWait(Context& c);
  void TensorMapReplace(Context& c);
  TensorMap ReadTensorMap(Context& c, const Site& site, int lane, uint64_t address);
  void CopyBox(const Site& site, Cta& cta, const TensorMap& map, const std::array<int32_t, 5>& coords, uint32_t offset,
               const Actor& reader, const Actor& writer, bool load, int reduce);
  void TryCancel(Context& c);
  void QueryCancel(Context& c);

  // ---- products.cc: operands and arithmetic of both kinds of tensor core ----
  struct Matrix2d {
    uint64_t descriptor;
    int rows, k;
    Format format;
    bool mn_major;
    int first_row = 0;
  };
  // `tile` becomes [k][row].
  void LoadTile(const Site& site, Cta& cta, const Matrix2d& matrix, const Actor& actor, Tile& tile);

  // ---- wgmma.cc ----
  void WgmmaIssue(Context& c);
  void WgmmaCommit(Context& c);
  void WgmmaWait(Context& c);
  void WgmmaExecute(Warp& warp);
  void CheckAccumulators(Context& c);

  // ---- tcgen05.cc: products, copies, completion ----
  struct ScaleFormat {
    int block;           // elements that share a factor
    bool exponent_only;  // ue8m0, otherwise ue4m3
  };
  void ApplyScales(const Site& site, Cta& cta, const Actor& actor, ScaleFormat format, uint32_t address, uint32_t id,
                   std::vector<float>& values, int rows, int k);
  void TcMma(Context& c);
  void TcCommit(Context& c);
  void TcCp(Context& c);
  void EnqueueTensor(Cluster& cluster, Cta& cta, Task task);

  // ---- tmem.cc: allocation, loads and stores ----
  Step TcAlloc(Context& c);
  void TcDealloc(Context& c);
  void TcLoadStore(Context& c);
  void TcWait(Context& c);
  void TcFinish(Warp& warp, bool loads, uint64_t serial);
  void TcUsed(Warp& warp, uint64_t serial);
  void CheckLoads(Context& c);
  Tmem& TmemOf(const Site& site, Cta& cta, int group);
  std::vector<Cta*> Pair(const Site& site, Cta& cta, bool pair);
  void TouchTmem(const Site& site, Cta& cta, uint32_t lane, uint32_t lanes, uint32_t column, uint32_t columns,
                 const Actor& actor, bool writes);

  const Program& program_;
  Options options_;
  GlobalMemory& memory_;
  std::vector<uint8_t> constants_;
  std::array<int, kSpaceClasses> fence_of_{};       // which fenced clocks are for a space, or -1
  int fences_ = 0;                                  // how many there are
  std::vector<std::unique_ptr<Cluster>> clusters_;  // that run now
  std::deque<Dim3> waiting_;
  uint16_t started_ = 0;
  uint64_t progress_ = 0;  // grows with everything that may end a wait
  Random random_;
  std::set<uint64_t> fetched_;  // timeline mode: what loads have brought into L2
  double now_ = 0;              // timeline mode: of what runs
  std::map<std::pair<uint32_t, uint32_t>, int> reported_races_;
  std::set<std::pair<uint32_t, uint32_t>> warned_;
  alignas(64) uint8_t scratch_[512];
};

}  // namespace ptx
