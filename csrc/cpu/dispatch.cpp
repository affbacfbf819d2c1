#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace fusedaccum {
namespace cpu {
namespace {

std::vector<const KernelTable*> usable() {
  std::vector<const KernelTable*> tables{&kernels_default};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    tables.push_back(&kernels_avx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      tables.push_back(&kernels_avx512);
    }
  }
#endif
  return tables;
}

const KernelTable* find(const std::string& name) {
  std::string names;
  for (const KernelTable* table : usable()) {
    if (name == table->name) return table;
    names += std::string(names.empty() ? "" : ", ") + table->name;
  }
  throw std::invalid_argument("FUSEDACCUM_CPU_CAPABILITY is '" + name + "'; this CPU has: " + names);
}

const KernelTable* choose() {
  const char* wanted = std::getenv("FUSEDACCUM_CPU_CAPABILITY");
  return wanted && *wanted ? find(wanted) : usable().back();
}

std::atomic<const KernelTable*> in_use{nullptr};

}  // namespace

const KernelTable& kernels() {
  const KernelTable* table = in_use.load(std::memory_order_acquire);
  if (table == nullptr) {
    table = choose();
    in_use.store(table, std::memory_order_release);
  }
  return *table;
}

bool prefetch_pays() {
#if defined(__x86_64__)
  static const bool intel = __builtin_cpu_is("intel");
  return intel;
#else
  return false;
#endif
}

std::vector<std::string> capabilities() {
  std::vector<std::string> names;
  for (const KernelTable* table : usable()) names.emplace_back(table->name);
  return names;
}

void set_capability(const std::string& name) { in_use.store(find(name), std::memory_order_release); }

}  // namespace cpu
}  // namespace fusedaccum
