// What Python calls, through ctypes.
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "machine.h"

namespace {

struct BufferArgument {
  const char* name;
  uint64_t start;
  uint64_t bytes;
  uint8_t* written;
  int32_t writable;
};

struct LaunchArgument {
  const int32_t* instructions;
  int64_t instruction_count;
  const int64_t* operands;
  int64_t operand_count;
  const int64_t* specials;
  int64_t special_count;
  const uint8_t* constants;
  int64_t constant_bytes;
  int64_t register_bytes;
  int64_t static_shared;
  uint32_t grid[3], block[3], cluster[3];
  uint32_t shared_bytes;
  uint32_t registers;
  uint64_t seed;
  int32_t races, blackwell, max_faults, resident_clusters, timeline;
  int64_t max_instructions;
  const double* costs;  // the fields of ptx::Costs
  const BufferArgument* buffers;
  int64_t buffer_count;
  int64_t* counts;  // by instruction; written
  int64_t executed;
};

std::string Quote(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    if (c == '\n') {
      quoted += "\\n";
    } else if (static_cast<unsigned char>(c) >= 32) {
      quoted += c;
    }
  }
  return quoted + "\"";
}

}  // namespace

// Runs a launch. Returns its faults as JSON, to be freed with ptx_emulator_free.
extern "C" char* ptx_emulator_run(LaunchArgument* launch) {
  using ptx::Text;
  ptx::Program program;
  static_assert(sizeof(ptx::Instr) == 16 * sizeof(int32_t));
  static_assert(sizeof(ptx::Operand) == 5 * sizeof(int64_t));
  const auto* instructions = reinterpret_cast<const ptx::Instr*>(launch->instructions);
  program.instructions.assign(instructions, instructions + launch->instruction_count);
  const auto* operands = reinterpret_cast<const ptx::Operand*>(launch->operands);
  program.operands.assign(operands, operands + launch->operand_count);
  const auto* specials = reinterpret_cast<const ptx::SpecialRegister*>(launch->specials);
  program.specials.assign(specials, specials + launch->special_count);
  program.constants.assign(launch->constants, launch->constants + launch->constant_bytes);
  program.register_bytes = launch->register_bytes;
  program.static_shared = launch->static_shared;
  ptx::Options options;
  options.grid = {launch->grid[0], launch->grid[1], launch->grid[2]};
  options.block = {launch->block[0], launch->block[1], launch->block[2]};
  options.cluster = {launch->cluster[0], launch->cluster[1], launch->cluster[2]};
  options.shared_bytes = launch->shared_bytes;
  options.registers = launch->registers;
  options.seed = launch->seed;
  options.races = launch->races != 0;
  options.blackwell = launch->blackwell != 0;
  options.max_faults = launch->max_faults;
  options.max_instructions = launch->max_instructions;
  options.resident_clusters = launch->resident_clusters;
  options.timeline = launch->timeline != 0;
  ptx::GlobalMemory memory;
  for (int64_t i = 0; i < launch->buffer_count; ++i) {
    const BufferArgument& argument = launch->buffers[i];
    ptx::Buffer buffer;
    buffer.name = argument.name;
    buffer.start = argument.start;
    buffer.end = argument.start + argument.bytes;
    buffer.writable = argument.writable != 0;
    buffer.written = argument.written;
    if (buffer.writable && options.races) buffer.shadow = std::make_unique<ptx::Shadow>(argument.bytes);
    memory.Add(std::move(buffer));
  }
  ptx::Machine machine(program, options, memory);
  std::memcpy(&machine.costs, launch->costs, sizeof(machine.costs));
  machine.Run();
  launch->executed = machine.instructions;
  std::memcpy(launch->counts, machine.executed.data(), machine.executed.size() * sizeof(int64_t));
  const auto list = [](const std::vector<ptx::Fault>& faults) {
    std::string json = "[";
    for (const ptx::Fault& fault : faults) {
      if (json.size() > 1) json += ", ";
      json += "{\"kind\": " + Quote(fault.kind) + ", \"message\": " + Quote(fault.message) +
              Text(", \"pc\": %u, \"cta\": [%u, %u, %u], \"warp\": %d, \"lanes\": %u}", fault.site.pc, fault.site.cta.x,
                   fault.site.cta.y, fault.site.cta.z, fault.site.warp, fault.site.lanes);
    }
    return json + "]";
  };
  std::string timeline = "null";
  if (options.timeline) {
    std::vector<ptx::CtaTimeline*> ctas;
    for (const auto& cta : machine.timelines) ctas.push_back(cta.get());
    timeline = ptx::ToJson(ctas, program);
  }
  const std::string json = "{\"faults\": " + list(machine.faults) + ", \"warnings\": " + list(machine.warnings) +
                           ", \"timeline\": " + timeline + "}";
  return strdup(json.c_str());
}

extern "C" void ptx_emulator_free(char* text) { std::free(text); }
