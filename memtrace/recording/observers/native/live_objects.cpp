#include "live_objects.h"   // first: it includes Python.h

#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

// Python before 3.12 has no function that visits all objects without making a list of them, so its lists are followed.
#if PY_VERSION_HEX < 0x030C0000 && __has_include(<internal/pycore_gc.h>)
#define MEMTRACE_FOLLOWS_GC_LISTS
#define Py_BUILD_CORE 1
#undef _PyGC_FINALIZED   // a function in the public headers, and a macro in this one
#include <internal/pycore_gc.h>
#undef Py_BUILD_CORE
#endif

namespace memtrace {
namespace {

size_t hash_of(const void* address) { return (reinterpret_cast<uintptr_t>(address) * 0x9E3779B97F4A7C15u) >> 40; }

// Collects the objects that are instances of some types. It only reads the types of objects, so it can be used while the
// lists of the garbage collector must not change.
class Search {
 public:
  explicit Search(PyObject* types) : types_(types), found_(static_cast<size_t>(PyTuple_GET_SIZE(types))) {}
  ~Search() {
    for (auto& objects : found_)
      for (PyObject* object : objects) Py_DECREF(object);
  }
  Search(const Search&) = delete;
  Search& operator=(const Search&) = delete;

  void visit(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    Entry& entry = cache_[hash_of(type) % cache_.size()];
    if (entry.type != type) entry = {type, index_of(type)};
    if (entry.index == kOther) return;
    found_[static_cast<size_t>(entry.index)].push_back(object);
    Py_INCREF(object);
  }

  // A list of lists, one for each type.
  PyObject* lists() const {
    PyObject* all = PyList_New(0);
    for (size_t i = 0; all != nullptr && i < found_.size(); ++i) {
      PyObject* list = PyList_New(0);
      bool ok = list != nullptr;
      for (size_t k = 0; ok && k < found_[i].size(); ++k) ok = PyList_Append(list, found_[i][k]) == 0;
      if (!ok || PyList_Append(all, list) != 0) Py_CLEAR(all);
      Py_XDECREF(list);
    }
    return all;
  }

 private:
  static constexpr int8_t kOther = -1;
  struct Entry {
    PyTypeObject* type = nullptr;
    int8_t index = kOther;
  };

  int8_t index_of(PyTypeObject* type) const {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types_); ++i)
      if (PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(types_, i)))) return static_cast<int8_t>(i);
    return kOther;
  }

  PyObject* types_;
  std::vector<std::vector<PyObject*>> found_;
  std::array<Entry, 1024> cache_{};   // by address: a process has few types and many objects
};

#if PY_VERSION_HEX >= 0x030C0000

bool visit_all(Search& search) {
  struct Visit {
    Search& search;
    bool has_memory;
  } visit{search, true};
  PyUnstable_GC_VisitObjects(
      [](PyObject* object, void* argument) {
        auto& current = *static_cast<Visit*>(argument);
        try {
          current.search.visit(object);
        } catch (const std::bad_alloc&) {   // must not pass through the functions of Python
          current.has_memory = false;
        }
        return static_cast<int>(current.has_memory);
      },
      &visit);
  if (!visit.has_memory) throw std::bad_alloc();
  return true;
}

#elif defined(MEMTRACE_FOLLOWS_GC_LISTS)

// Follows the lists of the garbage collector. Nearly every step waits for memory, so the lists are followed from many
// places at once: from their heads and from modules, which are spread over them. Each chain ends where another begins.
class Chains {
 public:
  void begin_at(PyGC_Head& head) {
    starts_.push_back(&head);
    ends_.insert(&head);
  }

  void begin_at_modules() {
    PyObject* modules = PyImport_GetModuleDict();
    if (modules == nullptr || !PyDict_CheckExact(modules)) return;
    const Py_ssize_t interval = 1 + PyDict_GET_SIZE(modules) / kMaxModules;
    PyObject* module = nullptr;
    for (Py_ssize_t position = 0, i = 0; PyDict_Next(modules, &position, nullptr, &module); ++i) {
      if (i % interval != 0 || !PyModule_CheckExact(module)) continue;
      PyGC_Head* node = _Py_AS_GC(module);
      if (_PyGCHead_NEXT(node) == nullptr || !ends_.insert(node)) continue;   // not in a list, or known by two names
      starts_.push_back(node);
      modules_.push_back(module);
    }
  }

  void visit(Search& search) {
    for (PyObject* module : modules_) search.visit(module);
    for (PyGC_Head*& node : starts_) node = _PyGCHead_NEXT(node);
    while (!starts_.empty()) {
      for (size_t i = 0; i < starts_.size();) {
        PyGC_Head* node = starts_[i];
        if (ends_.contains(node)) {
          starts_[i] = starts_.back();
          starts_.pop_back();
          continue;
        }
        PyGC_Head* next = _PyGCHead_NEXT(node);
        __builtin_prefetch(next);
        __builtin_prefetch(reinterpret_cast<char*>(next) + sizeof(PyGC_Head) + offsetof(PyObject, ob_type));
        search.visit(reinterpret_cast<PyObject*>(node + 1));
        starts_[i++] = next;
      }
    }
  }

 private:
  static constexpr Py_ssize_t kMaxModules = 48;

  // A set of few addresses that is asked once for every object.
  class Addresses {
   public:
    // Whether the address is new.
    bool insert(const void* address) {
      size_t slot = slot_of(address);
      for (; slots_[slot] != nullptr; slot = (slot + 1) % slots_.size())
        if (slots_[slot] == address) return false;
      slots_[slot] = address;
      return true;
    }
    bool contains(const void* address) const {
      for (size_t slot = slot_of(address); slots_[slot] != nullptr; slot = (slot + 1) % slots_.size())
        if (slots_[slot] == address) return true;
      return false;
    }

   private:
    size_t slot_of(const void* address) const { return hash_of(address) % slots_.size(); }
    std::array<const void*, 1024> slots_{};
  };

  std::vector<PyGC_Head*> starts_;
  std::vector<PyObject*> modules_;
  Addresses ends_;
};

// The state of the garbage collector. A new object is the last one of the youngest generation, so it is followed by the
// head of that list. Null if something is not as Python's header describes it.
_gc_runtime_state* collector_state() {
  PyObject* object = PyList_New(0);
  if (object == nullptr) return nullptr;
  PyGC_Head* youngest = _PyGCHead_NEXT(_Py_AS_GC(object));
  Py_DECREF(object);
  const size_t offset = offsetof(_gc_runtime_state, generations);
  auto* state = reinterpret_cast<_gc_runtime_state*>(reinterpret_cast<char*>(youngest) - offset);
  return state->generation0 == youngest ? state : nullptr;
}

bool visit_all(Search& search) {
  _gc_runtime_state* state = collector_state();
  if (state == nullptr || state->collecting) return false;
  Chains chains;
  for (gc_generation& generation : state->generations) chains.begin_at(generation.head);
  chains.begin_at(state->permanent_generation.head);   // gc.freeze()
  chains.begin_at_modules();
  chains.visit(search);
  return true;
}

#else

bool visit_all(Search&) { return false; }

#endif

// The same by the public interface, several times slower.
bool visit_listed(Search& search) {
  PyObject* module = PyImport_ImportModule("gc");
  PyObject* objects = module == nullptr ? nullptr : PyObject_CallMethod(module, "get_objects", nullptr);
  Py_XDECREF(module);
  if (objects == nullptr) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects); ++i) search.visit(PyList_GET_ITEM(objects, i));
  Py_DECREF(objects);
  return true;
}

}  // namespace

// live_instances(types) -> a list for each of the types: the objects that are instances of it by their own type. Asks no
// object for anything, so that no code of the program runs.
PyObject* live_instances(PyObject*, PyObject* types) {
  if (!PyTuple_Check(types) || PyTuple_GET_SIZE(types) > INT8_MAX) {
    PyErr_SetString(PyExc_TypeError, "usage: live_instances(tuple of types)");
    return nullptr;
  }
  Search search(types);
  if (!visit_all(search) && !visit_listed(search)) return PyErr_Occurred() ? nullptr : PyErr_NoMemory();
  return search.lists();
}

}  // namespace memtrace
