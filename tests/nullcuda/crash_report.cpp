// Says where a process crashed: a SIGSEGV prints the native call stack of its thread before it ends the process. What runs
// after the crash neither allocates nor waits for a lock of the program: the thread may have crashed in malloc.
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include <unwind.h>

namespace {

constexpr int kMaxFunctions = 128;

pid_t loading_process;
int first_stderr = -1;   // standard error as it was when this library was loaded

struct CallStack {
  void* addresses[kMaxFunctions];   // in each function, the innermost first
  int size = 0;
};

bool is_readable(uintptr_t address) {
  // The kernel reads the signals before it notices that it knows no such change of the mask (EINVAL).
  return syscall(SYS_rt_sigprocmask, ~0, address & ~uintptr_t{7}, nullptr, 8) == 0 || errno != EFAULT;
}

// Whether an address is that of the code which signal handlers return to: mov $SYS_rt_sigreturn, %rax; syscall.
bool is_signal_return(uintptr_t address) {
  constexpr char code[] = "\x48\xc7\xc0\x0f\x00\x00\x00\x0f\x05";
  constexpr size_t size = sizeof code - 1;
  return is_readable(address) && is_readable(address + size) &&
         memcmp(reinterpret_cast<const void*>(address), code, size) == 0;
}

// Where an invalid pointer was called, goes back to the caller: the unwinder would crash when it reads the code there.
void leave_invalid_function(greg_t* registers) {
  const auto stack = static_cast<uintptr_t>(registers[REG_RSP]);
  if (is_readable(static_cast<uintptr_t>(registers[REG_RIP])) || !is_readable(stack)) return;
  registers[REG_RIP] = *reinterpret_cast<const greg_t*>(stack);
  registers[REG_RSP] += sizeof(greg_t);
}

_Unwind_Reason_Code add_function(_Unwind_Context* context, void* call_stack) {
  auto& stack = *static_cast<CallStack*>(call_stack);
  if (stack.size == kMaxFunctions) return _URC_END_OF_STACK;
  const uintptr_t address = _Unwind_GetIP(context);
  stack.addresses[stack.size++] = reinterpret_cast<void*>(address);
  if (is_signal_return(address))   // above its frame, the kernel saved the registers of the interrupted function
    leave_invalid_function(reinterpret_cast<ucontext_t*>(_Unwind_GetCFA(context))->uc_mcontext.gregs);
  return _URC_NO_REASON;
}

bool is_same_file(int one, int other) {
  struct stat a, b;
  return fstat(one, &a) == 0 && fstat(other, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

void report(int file, const siginfo_t& signal) {
  char line[160];
  int length = snprintf(line, sizeof line, "nullcuda: SIGSEGV in thread %d of process %d", gettid(), getpid());
  if (signal.si_code > 0)   // the access itself; Python's faulthandler sends the signal once more, without an address
    length += snprintf(line + length, sizeof line - length, " at address %p", signal.si_addr);
  length += snprintf(line + length, sizeof line - length, "; native call stack, innermost function first:\n");
  if (write(file, line, length) != length) return;
  CallStack stack;
  _Unwind_Backtrace(add_function, &stack);
  backtrace_symbols_fd(stack.addresses, stack.size, file);
}

void handle_crash(int number, siginfo_t* signal, void*) {
  report(STDERR_FILENO, *signal);
  // pytest redirects its standard error to a file that is lost in a crash. A forked child writes where its parent wants it.
  if (getpid() == loading_process && !is_same_file(first_stderr, STDERR_FILENO)) report(first_stderr, *signal);
  ::signal(number, SIG_DFL);
  raise(number);   // delivered when this handler returns: the process ends as it would have ended without the report
}

__attribute__((constructor)) void nullcuda_report_crashes() {
  loading_process = getpid();
  first_stderr = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 256);   // a high number: programs expect the low ones to be free
  struct sigaction action {};
  action.sa_sigaction = handle_crash;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
}

}  // namespace
