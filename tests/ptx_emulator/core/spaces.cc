// Loads and stores, and their checks: bounds, alignment, permission, initialisation, races.
#include <algorithm>

#include "machine.h"

namespace ptx {

Actor Machine::LaneActor(const Context& c, int lane, uint32_t flags) const {
  Actor actor;
  actor.access.clock = c.warp.clock;
  actor.access.lanes = 1u << lane;
  actor.access.pc_flags = c.fragment.pc | flags | 15u << kBytesShift;
  actor.access.base = static_cast<uint16_t>(c.warp.agent);
  actor.access.cluster = c.warp.cta->cluster->number;
  actor.clocks = options_.races ? &c.warp.lanes[lane] : nullptr;
  return actor;
}

Machine::SharedPlace Machine::Shared(const Site& site, Cluster& cluster, uint32_t address, uint64_t bytes,
                                     uint32_t align) {
  const uint32_t rank = address >> kRankShift, offset = address & kOffsetMask;
  if (rank >= cluster.ctas.size()) {
    Fail("out-of-bounds", site,
         Text("shared address %#x is of CTA %u of the cluster, which has %zu", address, rank, cluster.ctas.size()));
  }
  const uint32_t end = kReservedShared + options_.shared_bytes;
  if (offset < kReservedShared || offset + bytes > end) {
    Fail("out-of-bounds", site,
         Text("%llu bytes at byte %d of shared memory, of which the launch has %u",
              static_cast<unsigned long long>(bytes), static_cast<int>(offset) - static_cast<int>(kReservedShared),
              options_.shared_bytes));
  }
  if (offset % align != 0) {
    Fail("misaligned", site, Text("shared address %#x is not a multiple of %u", address, align));
  }
  Cta& cta = *cluster.ctas[rank];
  if (cta.ended) {
    Fail("protocol", site,
         Text("CTA (%u, %u, %u) has ended: its shared memory, byte %u here, is gone", cta.id.x, cta.id.y, cta.id.z,
              offset - kReservedShared));
  }
  return {&cta, offset};
}

// .shared and .shared::cta are the window of a thread's own CTA.
void Machine::CheckWindow(const Context& c, const Site& site, const SharedPlace& place) {
  if (!c.instr.has(k_own_shared) || place.cta == c.warp.cta) return;
  Fail("out-of-bounds", site,
       Text("byte %u of shared memory of CTA rank %u: .shared::cta reaches the CTA's own, .shared::cluster that of "
            "others",
            place.offset - kReservedShared, place.cta->rank));
}

void Machine::ReadShared(const Site& site, Cta& cta, uint32_t offset, uint32_t bytes, const Actor& actor, void* to) {
  Use(site, cta, actor);
  const uint8_t* written = cta.shared_written.data() + offset;
  if (std::memchr(written, 0, bytes) != nullptr) {
    const uint32_t first = static_cast<uint32_t>(std::find(written, written + bytes, 0) - written);
    const auto barrier = cta.barriers.find((offset + first) / 8 * 8);
    if (barrier != cta.barriers.end() && barrier->second.live) {
      Fail("protocol", site, Text("byte %u of shared memory belongs to an mbarrier", offset + first - kReservedShared));
    }
    Fail("uninitialised", site,
         Text("byte %u of shared memory of CTA (%u, %u, %u) was never written", offset + first - kReservedShared,
              cta.id.x, cta.id.y, cta.id.z));
  }
  if (options_.races) {
    cta.shadow->Touch(offset, bytes, actor, false, [&](const Access& before, bool before_writes, uint64_t at) {
      Race("shared memory", site, before, before_writes, false, at - kReservedShared, *cta.cluster, "");
    });
  }
  std::memcpy(to, cta.shared.data() + offset, bytes);
}

void Machine::WriteShared(const Site& site, Cta& cta, uint32_t offset, uint32_t bytes, const Actor& actor,
                          const void* from) {
  Use(site, cta, actor);
  const uint32_t first_word = offset / 8, last_word = (offset + bytes - 1) / 8;
  if (std::memchr(cta.barrier_words.data() + first_word, 1, last_word - first_word + 1) != nullptr) {
    Fail("protocol", site,
         Text("a write to bytes %u to %u of shared memory, where an mbarrier is", offset - kReservedShared,
              offset + bytes - kReservedShared));
  }
  if (options_.races) {
    cta.shadow->Touch(offset, bytes, actor, true, [&](const Access& before, bool before_writes, uint64_t at) {
      Race("shared memory", site, before, before_writes, true, at - kReservedShared, *cta.cluster, "");
    });
  }
  std::memcpy(cta.shared.data() + offset, from, bytes);
  std::memset(cta.shared_written.data() + offset, 1, bytes);
  ++progress_;
}

void Machine::ReadGlobal(const Site& site, Cluster& cluster, uint64_t address, uint64_t bytes, const Actor& actor,
                         void* to) {
  Buffer* buffer = memory_.Find(address, bytes);
  if (buffer == nullptr) {
    Fail("out-of-bounds", site,
         Text("a read of %llu bytes at %#llx: %s", static_cast<unsigned long long>(bytes),
              static_cast<unsigned long long>(address), memory_.Nearest(address).c_str()));
  }
  const uint64_t offset = address - buffer->start;
  if (buffer->written != nullptr && std::memchr(buffer->written + offset, 0, bytes) != nullptr) {
    Fail("uninitialised", site,
         Text("a read of buffer %s at byte %llu, which nothing wrote", buffer->name.c_str(),
              static_cast<unsigned long long>(offset)));
  }
  if (options_.races && buffer->shadow != nullptr) {
    buffer->shadow->Touch(offset, bytes, actor, false, [&](const Access& before, bool before_writes, uint64_t at) {
      Race("global memory", site, before, before_writes, false, at, cluster, buffer->name);
    });
  }
  std::memcpy(to, reinterpret_cast<const void*>(address), bytes);
}

void Machine::WriteGlobal(const Site& site, Cluster& cluster, uint64_t address, uint64_t bytes, const Actor& actor,
                          const void* from) {
  Buffer* buffer = memory_.Find(address, bytes);
  if (buffer == nullptr) {
    Fail("out-of-bounds", site,
         Text("a write of %llu bytes at %#llx: %s", static_cast<unsigned long long>(bytes),
              static_cast<unsigned long long>(address), memory_.Nearest(address).c_str()));
  }
  const uint64_t offset = address - buffer->start;
  if (!buffer->writable) {
    Fail("read-only", site,
         Text("a write to buffer %s, which is read-only, at byte %llu", buffer->name.c_str(),
              static_cast<unsigned long long>(offset)));
  }
  if (!buffer->coherence.empty()) MarkCoherence(site, *buffer, offset, bytes, kStored);
  if (options_.races && buffer->shadow != nullptr) {
    buffer->shadow->Touch(offset, bytes, actor, true, [&](const Access& before, bool before_writes, uint64_t at) {
      Race("global memory", site, before, before_writes, true, at, cluster, buffer->name);
    });
  }
  std::memcpy(reinterpret_cast<void*>(address), from, bytes);
  if (buffer->written != nullptr) std::memset(buffer->written + offset, 1, bytes);
  ++progress_;
}

// What ld.global.nc reads must not change while the kernel runs.
void Machine::MarkCoherence(const Site& site, Buffer& buffer, uint64_t offset, uint64_t bytes, uint8_t how) {
  for (uint64_t at = offset; at < offset + bytes; ++at) {
    uint8_t& uses = buffer.coherence[at];
    uses |= how;
    if (uses == (kStored | kNonCoherent)) {
      Fail("protocol", site,
           Text("byte %llu of buffer %s is read by ld.global.nc, and written by this kernel",
                static_cast<unsigned long long>(at), buffer.name.c_str()));
    }
  }
}

// The space of an access; a generic address in the window of shared memory becomes one of shared memory.
Space Machine::Resolve(const Context& c, uint64_t& address) const {
  if (c.instr.space() != Space::generic) return c.instr.space();
  if (address >> 32 == kSharedWindow >> 32) {
    address &= 0xffffffff;
    return Space::shared;
  }
  return Space::global;
}

// Whether all lanes store the same value to the same place: one write of all of them, not a race between them.
bool Machine::StoresAlike(const Context& c) const {
  const int first = __builtin_ctz(c.mask);
  for (int l = first + 1; l < 32; ++l) {
    if (!(c.mask >> l & 1)) continue;
    if (Address(c, 0, l) != Address(c, 0, first)) return false;
    for (int j = 1; j <= c.instr.count; ++j) {
      if (Value(c, j, l) != Value(c, j, first)) return false;
    }
  }
  return true;
}

void Machine::LoadStore(Context& c) {
  const Instr& i = c.instr;
  const bool loads = i.op() == Op::ld;
  const uint32_t size = static_cast<uint32_t>(i.bits / 8), bytes = size * static_cast<uint32_t>(i.count);
  const int address_at = loads ? i.count : 0;
  const int first = loads ? 0 : 1;
  const Site site = c.site(*this);
  Cluster& cluster = *c.warp.cta->cluster;
  uint32_t lanes = c.mask;
  Clocks known;
  if (!loads && (c.mask & (c.mask - 1)) != 0 && StoresAlike(c)) {
    lanes = c.mask & -c.mask;
    if (options_.races) {
      known = c.warp.lanes[__builtin_ctz(c.mask)];
      for (int l = 0; l < 32; ++l) {
        if (c.mask >> l & 1) Meet(known, c.warp.lanes[l]);
      }
    }
  }
  for (int l = 0; l < 32; ++l) {
    if (!(lanes >> l & 1)) continue;
    uint64_t address = Address(c, address_at, l);
    const Space space = Resolve(c, address);
    Actor actor = LaneActor(c, l, i.has(k_strong) ? kAtomic : 0);
    if (lanes != c.mask && options_.races) {
      actor.access.lanes = c.mask;
      for (int other = 0; other < 32; ++other) {  // each lane is behind its own earlier accesses
        if (c.mask >> other & 1) known.seen[c.warp.agent + static_cast<uint32_t>(other)] = c.warp.clock;
      }
      actor.clocks = &known;
    }
    uint8_t data[64];
    if (loads) {
      if (space == Space::shared) {
        const SharedPlace place = Shared(site, cluster, static_cast<uint32_t>(address), bytes, bytes);
        CheckWindow(c, site, place);
        // Members of a vector that go nowhere are not read: their bytes may hold nothing.
        const uint32_t used = i.extra == 0 ? ~0u : static_cast<uint32_t>(i.extra);
        bool all = true;
        for (int j = 0; j < i.count; ++j) {
          all &= c.operands[j].kind != kSink && (used >> (j * size) & ((1u << (size < 4 ? size : 4)) - 1)) != 0;
        }
        if (all) {
          ReadShared(site, *place.cta, place.offset, bytes, actor, data);
        } else {
          std::memset(data, 0xee, sizeof(data));
          for (int j = 0; j < i.count; ++j) {
            if (c.operands[j].kind == kSink || (used >> (j * size) & ((1u << (size < 4 ? size : 4)) - 1)) == 0)
              continue;
            ReadShared(site, *place.cta, place.offset + j * size, size, actor, data + j * size);
          }
        }
      } else {
        if (address % bytes != 0) {
          Fail("misaligned", site,
               Text("address %#llx is not a multiple of %u", static_cast<unsigned long long>(address), bytes));
        }
        ReadGlobal(site, cluster, address, bytes, actor, data);
        Buffer* buffer = i.has(k_nc) ? memory_.Find(address, bytes) : nullptr;
        if (buffer != nullptr && !buffer->coherence.empty()) {
          MarkCoherence(site, *buffer, address - buffer->start, bytes, kNonCoherent);
        }
      }
      if (i.has(k_strong)) Observe(c, l, address);
      for (int j = 0; j < i.count; ++j) {
        uint64_t value = 0;
        std::memcpy(&value, data + j * size, size);
        if (i.kind == 's' && size < 8) {
          value = static_cast<uint64_t>(static_cast<int64_t>(value << (64 - i.bits)) >> (64 - i.bits));
          if (c.operands[j].bits <= 32) value &= c.operands[j].bits == 16 ? 0xffff : 0xffffffff;
        }
        Put(c, j, l, value);
      }
      continue;
    }
    for (int j = 0; j < i.count; ++j) {
      const uint64_t value = Value(c, first + j, l);
      std::memcpy(data + j * size, &value, size);
    }
    Publish(c, lanes == c.mask ? 1u << l : c.mask, address, false);
    if (space == Space::shared) {
      const SharedPlace place = Shared(site, cluster, static_cast<uint32_t>(address), bytes, bytes);
      CheckWindow(c, site, place);
      WriteShared(site, *place.cta, place.offset, bytes, actor, data);
    } else {
      if (address % bytes != 0) {
        Fail("misaligned", site,
             Text("address %#llx is not a multiple of %u", static_cast<unsigned long long>(address), bytes));
      }
      WriteGlobal(site, cluster, address, bytes, actor, data);
    }
  }
  if (i.has(k_release)) Tick(c.warp);
}

// stmatrix and ldmatrix: lanes 8j to 8j + 7 hold the addresses of the rows of matrix j; lane t has elements 2(t % 4)
// and the next one of row t / 4.
void Machine::Matrix(Context& c) {
  const Instr& i = c.instr;
  const bool stores = i.op() == Op::stmatrix;
  const bool trans = i.has(k_trans);
  const Site site = c.site(*this);
  Cluster& cluster = *c.warp.cta->cluster;
  const int address_at = stores ? 0 : i.count;
  SharedPlace all[32];  // before a result takes the place of an address
  for (int owner = 0; owner < 8 * i.count; ++owner) {
    all[owner] = Shared(site, cluster, static_cast<uint32_t>(Address(c, address_at, owner)), 16, 16);
    CheckWindow(c, site, all[owner]);
  }
  for (int j = 0; j < i.count; ++j) {
    uint16_t rows[8][8];
    const SharedPlace* places = all + 8 * j;
    for (int r = 0; r < 8; ++r) {
      const int owner = 8 * j + r;
      if (!stores) ReadShared(site, *places[r].cta, places[r].offset, 16, LaneActor(c, owner), rows[r]);
    }
    for (int t = 0; t < 32; ++t) {
      for (int h = 0; h < 2; ++h) {
        int row = t / 4, column = 2 * (t % 4) + h;
        if (trans) std::swap(row, column);
        if (stores) {
          rows[row][column] = static_cast<uint16_t>(Value(c, 1 + j, t) >> (16 * h));
        } else {
          const uint64_t old = h == 0 ? 0 : Value(c, j, t);
          Put(c, j, t, old | static_cast<uint64_t>(rows[row][column]) << (16 * h));
        }
      }
    }
    if (!stores) continue;
    for (int r = 0; r < 8; ++r) {
      // A row is put together from four lanes; the write is that of the lane whose address it goes to.
      WriteShared(site, *places[r].cta, places[r].offset, 16, LaneActor(c, 8 * j + r), rows[r]);
    }
  }
}

}  // namespace ptx
