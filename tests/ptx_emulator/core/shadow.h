// The last accesses of every piece of a memory, to find those that nothing orders.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "clocks.h"

namespace ptx {

constexpr uint32_t kAsync = 1u << 24;   // by the asynchronous proxy
constexpr uint32_t kAtomic = 1u << 25;  // atomic accesses do not race with each other
constexpr uint32_t kBytesShift = 26;    // which bytes of a word

// Some agents' access: those of `lanes`, counted from `base`, at the same clock.
struct Access {
  uint32_t clock = 0;
  uint32_t lanes = 0;  // 0: there is none
  uint32_t pc_flags = 0;
  uint16_t base = 0;
  uint16_t cluster = 0;

  uint32_t pc() const { return pc_flags & 0xffffff; }
  bool has(uint32_t flag) const { return pc_flags & flag; }
  uint32_t bytes() const { return pc_flags >> kBytesShift & 15; }
};

// Who accesses, and what it knows.
struct Actor {
  Access access;
  const Clocks* clocks = nullptr;
  int fence = kOfPlace;  // which fence must be between an earlier generic access and this one
};

// `fence`: which of the fenced clocks are for the place, or -1 where no fence of the program is for it. An asynchronous
// access is behind a generic one, be it a write or a read, only where a fence lies between them.
inline bool Ordered(const Access& before, const Access& now, const Clocks& clocks, int fence = kNoProxies) {
  if (before.cluster != now.cluster) return false;
  const bool crosses = fence != kNoProxies && now.has(kAsync) && !before.has(kAsync);
  if (crosses && fence < 0) return false;
  const uint32_t* known = (crosses ? clocks.fenced[static_cast<size_t>(fence)] : clocks.seen).data() + before.base;
  if (before.lanes == ~0u) {
    uint32_t late = 0;
    for (int i = 0; i < 32; ++i) late |= known[i] < before.clock;
    return late == 0;
  }
  for (uint32_t lanes = before.lanes; lanes != 0; lanes &= lanes - 1) {
    if (known[__builtin_ctz(lanes)] < before.clock) return false;
  }
  return true;
}

class Shadow {
 public:
  // Lines of `line_bytes`, of four words each.
  explicit Shadow(uint64_t bytes, uint32_t line_bytes = 16)
      : word_bytes_(line_bytes / 4), line_bytes_(line_bytes), lines_((bytes + line_bytes - 1) / line_bytes) {}

  // Which fences are for what the agents [first, first + agents) write here, and which for what others do.
  void SetFences(int of_own, int of_others, uint32_t first = 0, uint32_t agents = 0) {
    of_own_ = of_own;
    of_others_ = of_others;
    first_ = first;
    agents_ = agents;
  }

  // `report(before, before_writes, offset)` is called for each access that nothing orders before this one.
  template <typename Report>
  void Touch(uint64_t offset, uint64_t bytes, const Actor& actor, bool writes, const Report& report) {
    uint64_t at = offset;
    const uint64_t end = offset + bytes;
    while (at < end) {
      const uint64_t line_end = at / line_bytes_ * line_bytes_ + line_bytes_;
      const uint64_t stop = line_end < end ? line_end : end;
      Line& line = lines_[at / line_bytes_];
      if (stop - at == line_bytes_ && line.split < 0) {
        TouchCell(line.cell, actor, actor.access, writes, report, at);
      } else {
        TouchPart(line, at, stop, actor, writes, report);
      }
      at = stop;
    }
  }

 private:
  struct Cell {
    Access write, read;
    int32_t more = -1;
  };
  struct Line {
    Cell cell;
    int32_t split = -1;
  };

  template <typename Report>
  void TouchPart(Line& line, uint64_t at, uint64_t stop, const Actor& actor, bool writes, const Report& report) {
    if (line.split < 0) {
      if (free_.empty()) {
        line.split = static_cast<int32_t>(parts_.size());
        parts_.emplace_back();
      } else {
        line.split = free_.back();
        free_.pop_back();
      }
      for (Cell& cell : parts_[line.split]) {
        cell = line.cell;
        if (cell.more >= 0) {
          more_.push_back(std::vector<Access>(more_[line.cell.more]));
          cell.more = static_cast<int32_t>(more_.size()) - 1;
        }
      }
    }
    const bool whole = stop - at == line_bytes_;
    while (at < stop) {
      const uint64_t word_end = at / word_bytes_ * word_bytes_ + word_bytes_;
      const uint64_t end = word_end < stop ? word_end : stop;
      Access access = actor.access;
      if (end - at < word_bytes_ && word_bytes_ == 4) {
        access.pc_flags &= ~(15u << kBytesShift);
        access.pc_flags |= (((1u << (end - at)) - 1) << (at % 4)) << kBytesShift;
      }
      TouchCell(parts_[line.split][at % line_bytes_ / word_bytes_], actor, access, writes, report, at);
      at = end;
    }
    if (whole && writes) {
      line.cell = parts_[line.split][0];
      free_.push_back(line.split);
      line.split = -1;  // the pieces are alike again
    }
  }

  template <typename Report>
  void TouchCell(Cell& cell, const Actor& actor, const Access& access, bool writes, const Report& report,
                 uint64_t offset) {
    const Clocks& clocks = *actor.clocks;
    const auto conflicts = [&](const Access& before) {
      if (before.lanes == 0 || !(before.bytes() & access.bytes())) return false;
      if (before.has(kAtomic) && access.has(kAtomic)) return false;
      return !Ordered(before, access, clocks, actor.fence == kOfPlace ? FenceAfter(before) : actor.fence);
    };
    if (conflicts(cell.write)) report(cell.write, true, offset);
    if (writes) {
      if (conflicts(cell.read)) report(cell.read, false, offset);
      if (cell.more >= 0) {
        for (const Access& before : more_[cell.more]) {
          if (conflicts(before)) report(before, false, offset);
        }
        more_[cell.more].clear();
      }
      cell.write = access;
      cell.read = Access{};
      return;
    }
    if (Absorb(cell.read, access, clocks)) return;
    if (cell.more < 0) {
      cell.more = static_cast<int32_t>(more_.size());
      more_.emplace_back();
    }
    for (Access& before : more_[cell.more]) {
      if (Absorb(before, access, clocks)) return;
    }
    more_[cell.more].push_back(access);
  }

  // Which fence makes what others do here afterwards come later.
  int FenceAfter(const Access& before) const { return before.base - first_ < agents_ ? of_own_ : of_others_; }

  // Whether `now` takes the place of an earlier read, since whoever is ordered behind it is behind both.
  bool Absorb(Access& before, const Access& now, const Clocks& clocks) const {
    if (before.lanes == 0) {
      before = now;
      return true;
    }
    if (before.base == now.base && before.cluster == now.cluster) {
      if (before.clock == now.clock && before.pc_flags == now.pc_flags) {
        before.lanes |= now.lanes;
        return true;
      }
      if ((before.lanes & ~now.lanes) == 0 && before.bytes() == now.bytes()) {
        before = now;
        return true;
      }
      return false;
    }
    if (before.bytes() == now.bytes() && Ordered(before, now, clocks, FenceAfter(before))) {
      before = now;
      return true;
    }
    return false;
  }

  uint32_t word_bytes_, line_bytes_;
  int of_own_ = kNoProxies, of_others_ = kNoProxies;
  uint32_t first_ = 0, agents_ = 0;
  std::vector<Line> lines_;
  std::vector<std::array<Cell, 4>> parts_;
  std::vector<int32_t> free_;
  std::vector<std::vector<Access>> more_;
};

}  // namespace ptx
