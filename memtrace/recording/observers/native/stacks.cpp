// Records the Python stack of the calling thread, with one row in `names` for every distinct stack.
#include "marks.h"   // first: it includes Python.h

#include <string>
#include <unordered_map>
#include <unordered_set>

#include "compiled_regions.h"
#include "python_frames.h"
#include "state.h"

namespace memtrace {
namespace {

constexpr int kMaxDepth = 128;
constexpr int kMaxFrames = kMaxDepth + 16;   // with frames that are hidden

// Guarded by the GIL. Code objects are kept alive as long as their addresses identify them.
auto& stacks = *new std::unordered_map<uint64_t, int32_t>;    // ids by hash
auto& hidden_code = *new std::unordered_set<PyCodeObject*>;   // never released: a few functions of memtrace
auto& kept_code = *new std::unordered_set<PyCodeObject*>;

std::string text_of(PyObject* text) {
  Py_ssize_t length = 0;
  const char* bytes = text == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(text, &length);
  if (bytes == nullptr) {
    PyErr_Clear();
    return "?";
  }
  std::string clean(bytes, static_cast<size_t>(length));
  for (char& c : clean)
    if (c == '\t') c = ' ';   // tabs separate the parts of a frame's name
  return clean;
}

int32_t intern(const Position* positions, int depth) {
  std::vector<int32_t> frames;
  frames.reserve(static_cast<size_t>(depth));
  for (int i = 0; i < depth; ++i) {
    PyCodeObject* code = positions[i].code;
    if (const RegionSite* site = find_region_site(code, line_of(positions[i]))) {
      frames.insert(frames.end(), site->frames.begin(), site->frames.end());
      frames.push_back(site->generated_frame);
      continue;
    }
    PyObject* name = PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), "co_qualname");
    if (name == nullptr) {
      PyErr_Clear();
      name = Py_NewRef(code->co_name);
    }
    frames.push_back(recorder().names.id(
        NameKind::frame, text_of(code->co_filename) + "\t" + std::to_string(line_of(positions[i])) + "\t" + text_of(name)));
    Py_DECREF(name);
  }
  return recorder().names.add_stack(std::move(frames));
}

struct Stack {
  Position positions[kMaxFrames];
  int depth = 0;
  uint64_t hash = 1469598103934665603ull;

  void push(const Position& position) {
    positions[depth++] = position;
    const uint64_t frame = reinterpret_cast<uint64_t>(position.code) ^ (static_cast<uint64_t>(position.where) * 0x9E3779B97F4A7C15ull);
    hash = (hash ^ frame) * 1099511628211ull;
    hash ^= hash >> 29;
  }
};

// The id of a stack that the calling thread has not met before. Requires the GIL.
int32_t add_stack(const Stack& all) {
  Stack visible;
  for (int i = 0; i < all.depth && visible.depth < kMaxDepth; ++i) {
    Py_INCREF(all.positions[i].code);   // the entry of the thread's cache identifies it by its address, too
    if (!kept_code.insert(all.positions[i].code).second) Py_DECREF(all.positions[i].code);
    if (hidden_code.count(all.positions[i].code) == 0) visible.push(all.positions[i]);
  }
  if (visible.depth == 0) return kNone;
  const auto known = stacks.find(visible.hash);
  if (known != stacks.end()) return known->second;
  // Looking up names runs no user code, but must not clear a pending exception.
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  const int32_t id = intern(visible.positions, visible.depth);
  PyErr_Restore(type, value, traceback);
  stacks.emplace(visible.hash, id);
  return id;
}

void read_stack(PyThreadState* python, Stack& stack) {
  visit_frames(python, [&](const Position& position) {
    stack.push(position);
    return stack.depth < kMaxFrames;
  });
}

int32_t find_or_add_stack(PyThreadState* python, StackCache& cache) {
  Stack stack;
  if (!kFramesNeedGil) read_stack(python, stack);
  if (const int32_t* id = kFramesNeedGil ? nullptr : cache.find(stack.hash)) return *id;
  const PyGILState_STATE gil = PyGILState_Ensure();
  int32_t id = kNone;
  record_or_give_up([&] {
    if (kFramesNeedGil) read_stack(python, stack);
    const int32_t* known = kFramesNeedGil ? cache.find(stack.hash) : nullptr;
    id = known != nullptr ? *known : add_stack(stack);
    cache.put(stack.hash, id);
  });
  PyGILState_Release(gil);
  return id;
}

}  // namespace

int32_t python_stack(bool may_wait) {
  // A thread that Python does not know has no frames. Waiting for the GIL there could deadlock: the thread that holds
  // the GIL may be waiting for this one (parallel_for).
  PyThreadState* python = Py_IsInitialized() ? PyGILState_GetThisThreadState() : nullptr;
  if (python == nullptr || (!may_wait && !PyGILState_Check())) return kNone;
  int32_t id = kNone;
  record_or_give_up([&] {
    std::unique_ptr<StackCache>& cache = thread_state().stacks;
    if (cache == nullptr) cache = std::make_unique<StackCache>();
    id = find_or_add_stack(python, *cache);
  });
  return id;
}

void hide_code(PyObject* code) {
  if (hidden_code.insert(reinterpret_cast<PyCodeObject*>(code)).second) Py_INCREF(code);
}

void release_stacks() {
  for (PyCodeObject* code : kept_code) Py_DECREF(code);
  kept_code.clear();
  stacks.clear();
}

}  // namespace memtrace
