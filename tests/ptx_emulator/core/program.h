// A decoded kernel: what parser.py hands over.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ptx {

enum class Op : int32_t {
#define OP(name) name,
#define FLAG(name)
#define SPACE(name)
#define COMPARE(name)
#define ROUND(name)
#define SHUFFLE(name)
#define VOTE(name)
#define ATOMIC(name)
#define FORMAT(name)
#define KIND(name)
#define TMEM_SHAPE(name)
#define FIELD(name)
#define SPECIAL(name)
#include "opcodes.def"
#undef OP
};

#define OP(name)

#undef FLAG
#define FLAG(name) k_##name,
enum FlagIndex : int32_t {
#include "opcodes.def"
};
#undef FLAG
#define FLAG(name)

#undef SPACE
#define SPACE(name) name,
enum class Space : int32_t {
#include "opcodes.def"
};
#undef SPACE
#define SPACE(name)

#undef COMPARE
#define COMPARE(name) name,
enum class Compare : int32_t {
#include "opcodes.def"
};
#undef COMPARE
#define COMPARE(name)

#undef ROUND
#define ROUND(name) name,
enum class Round : int32_t {
#include "opcodes.def"
};
#undef ROUND
#define ROUND(name)

#undef SHUFFLE
#define SHUFFLE(name) name,
enum class Shuffle : int32_t {
#include "opcodes.def"
};
#undef SHUFFLE
#define SHUFFLE(name)

#undef VOTE
#define VOTE(name) name,
enum class Vote : int32_t {
#include "opcodes.def"
};
#undef VOTE
#define VOTE(name)

#undef ATOMIC
#define ATOMIC(name) name,
enum class Atomic : int32_t {
#include "opcodes.def"
};
#undef ATOMIC
#define ATOMIC(name)

#undef FORMAT
#define FORMAT(name) name,
enum class Format : int32_t {
#include "opcodes.def"
};
#undef FORMAT
#define FORMAT(name)

#undef KIND
#define KIND(name) name,
enum class MmaKind : int32_t {
#include "opcodes.def"
};
#undef KIND
#define KIND(name)

#undef TMEM_SHAPE
#define TMEM_SHAPE(name) name,
enum class TmemShape : int32_t {
#include "opcodes.def"
};
#undef TMEM_SHAPE
#define TMEM_SHAPE(name)

#undef FIELD
#define FIELD(name) name,
enum class MapField : int32_t {
#include "opcodes.def"
};
#undef FIELD
#define FIELD(name)

#undef SPECIAL
#define SPECIAL(name) name,
enum class Special : int32_t {
#include "opcodes.def"
};
#undef SPECIAL
#undef OP
#undef FLAG
#undef SPACE
#undef COMPARE
#undef ROUND
#undef SHUFFLE
#undef VOTE
#undef ATOMIC
#undef FORMAT
#undef KIND
#undef TMEM_SHAPE
#undef FIELD

struct Instr {
  int32_t op_number;
  int32_t line;           // in the PTX text
  int32_t guard;          // place of the predicate, or -1
  int32_t guard_negated;  // @!p
  int32_t target;         // of a branch
  int32_t first;          // operand
  int32_t operands;
  int32_t kind;     // of the type: 's', 'u', 'b', 'f', 'p'; 'h' f16, 'x' bf16, 't' tf32
  int32_t bits;     // of the type
  int32_t kind2;    // of the source of a conversion; the format of A
  int32_t bits2;    // of the source of a conversion; K of a product
  int32_t count;    // elements of a vector, coordinates, N of a product
  int32_t variant;  // a member of one of the other enums
  int32_t flags;
  int32_t space_number;
  int32_t extra;  // depends on the operation

  Op op() const { return static_cast<Op>(op_number); }
  Space space() const { return static_cast<Space>(space_number); }
  bool has(FlagIndex flag) const { return flags >> flag & 1; }
};

enum OperandKind : int64_t { kRegister, kConstant, kSink, kAddress, kConstantAddress };

struct Operand {
  int64_t kind;
  int64_t place;    // in the register file, or in the constants
  int64_t addend;   // of an address
  int64_t bits;     // of the register
  int64_t tracked;  // kRead, kWritten: of a register that something may read before it is written; and the others
};

constexpr int64_t kRead = 1, kWritten = 2;
constexpr int64_t kReadLoaded = 4, kWritesLoaded = 8;  // a register that a tcgen05.ld writes

struct SpecialRegister {
  int64_t number;
  int64_t place;
  int64_t bits;
};

struct Program {
  std::vector<Instr> instructions;
  std::vector<Operand> operands;
  std::vector<SpecialRegister> specials;
  std::vector<uint8_t> constants;
  int64_t register_bytes = 0;
  int64_t static_shared = 0;
};

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t count() const { return uint64_t{x} * y * z; }
};

struct Options {
  Dim3 grid, block, cluster;
  uint32_t shared_bytes = 0;  // static and dynamic
  uint64_t seed = 0;
  uint32_t registers = 0;  // of a thread at its start
  bool races = true;
  bool blackwell = false;
  int max_faults = 8;
  int64_t max_instructions = 0;
  int resident_clusters = 1;
  bool timeline = false;
};

constexpr uint32_t kReservedShared = 0x400;         // seen on an H200
constexpr uint32_t kMaxShared = 228 * 1024;         // of one multiprocessor
constexpr uint64_t kSharedWindow = 0x7efd00000000;  // generic address of shared memory, seen on an H200
constexpr uint32_t kRankShift = 24;                 // CTA rank in a shared::cluster address, seen on an H200
constexpr uint32_t kOffsetMask = (1u << kRankShift) - 1;

}  // namespace ptx
