// A stand-in for DOCA's libraries: the entry points that the project calls, over shared memory and without a network
// card. What a peer may reach is a file that both processes map; keys, rights and the ends of connections are small
// shared pages, held under a file lock by their owner, so that its death shows. Misuse that the real libraries forbid
// is an error here, and what would be undefined behaviour there ends the process.
//
// Environment: DOCA_SHIM_TRACE=FILE gets a line for each call. DOCA_SHIM_FAIL=FUNCTION=STATUS lets a function fail.
// DOCA_SHIM_START=connect: contexts run only once they are connected. DOCA_SHIM_EVENTS=0: no connection events.
// DOCA_SHIM_EDGE=1: a notification tells only of events after its request, and only once.
// DOCA_SHIM_LOSE=1: tasks whose turn comes meanwhile are not carried out; they end with their context.
// DOCA_SHIM_DOWN=FILE: while there is such a file, the link is down: what is carried out fails, and ends its
// connection. DOCA_SHIM_RETRY_MS: how long a task waits for a peer that is not connected (500).
#ifndef TESTS_TRANSPORT_DOCA_SHIM_SHIM_H_
#define TESTS_TRANSPORT_DOCA_SHIM_SHIM_H_

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

typedef int doca_error_t;
enum {
  SUCCESS = 0,
  NOT_PERMITTED = 2,
  IN_USE = 3,
  NOT_SUPPORTED = 4,
  INVALID_VALUE = 6,
  NO_MEMORY = 7,
  CONNECTION_ABORTED = 12,
  NOT_FOUND = 16,
  IO_FAILED = 17,
  BAD_STATE = 18,
  OPERATING_SYSTEM = 20,
  FULL = 24,
  IN_PROGRESS = 26,
};
enum { LOCAL_WRITE = 1, RDMA_READ = 2, RDMA_WRITE = 4 };
enum { IDLE = 0, STARTING = 1, RUNNING = 2, STOPPING = 3 };

union doca_data {
  void* ptr;
  uint64_t u64;
};

struct doca_devinfo {
  const char* ibdev;
  const char* iface;
  const char* pci;
  int can_rdma;
  uint8_t number;
};

struct doca_dev {
  const struct doca_devinfo* info;
  uint64_t domain;  // drawn for each opening: keys and connections of different openings do not go together
  int users;
};

// What happens next in a progress engine.
struct event {
  void (*run)(void* subject, int detail);
  void* subject;
  int detail;
  struct event* next;
};

struct doca_pe {
  pthread_mutex_t lock;
  struct event *first, *last;
  int notify;  // eventfd
  int armed;
  int contexts;
};

struct doca_task;

struct doca_ctx {
  struct doca_pe* pe;
  int state;
  union doca_data user_data;
  int in_flight;  // submitted, callback not yet run
  int tasks;      // allocated
  doca_error_t (*start)(struct doca_ctx*);
  doca_error_t (*submit)(struct doca_task*);
  void (*stop)(struct doca_ctx*);  // lets all that is queued fail
};

struct doca_task {
  struct doca_ctx* ctx;
  int is_read;
  struct doca_buf *source, *target;
  uint8_t *source_data, *target_data;  // of the buffers when they were set: must be the same at submission
  union doca_data user_data;
  doca_error_t status;
  int in_flight;
  void (*done)(void* task, union doca_data task_data, union doca_data ctx_data);
  struct doca_task* next;
};

// A page that says what a peer may do, in a file that its owner keeps locked.
struct page {
  uint64_t key;  // of a registration or of an end of a connection; 0: revoked
  uint64_t domain;
  uint64_t access;
  uint64_t peer;           // of a connection: key of the other end
  uint64_t address, size;  // of a registration, as its owner has it
  uint64_t file_offset;    // ... and where it lies
  char file[256];
};

struct shared_page {
  char name[64];
  int descriptor;
  struct page* page;
};

struct doca_mmap {
  uint8_t* address;  // as its owner has it
  size_t size;
  uint32_t access;
  struct doca_dev* dev;
  int started, exported, imported, buffers;
  int dmabuf;  // our own descriptor of it, or -1
  size_t dmabuf_offset;
  void* blob;
  struct shared_page page;
  uint64_t key;     // of an import
  uint8_t* mapped;  // of an import: the memory behind its page, in this process
  size_t mapped_size;
};

struct doca_buf_inventory {
  size_t total, used;
  int started;
};

struct doca_buf {
  struct doca_buf_inventory* inventory;
  struct doca_mmap* mmap;
  uint8_t *address, *data;
  size_t size, data_size;
};

// core.c
void shim_trace(const char* format, ...) __attribute__((format(printf, 1, 2)));
doca_error_t shim_fault(const char* function);
void shim_abort(const char* what) __attribute__((noreturn));
void shim_post(struct doca_pe* pe, void (*run)(void*, int), void* subject, int detail);
void shim_maybe_idle(struct doca_ctx* ctx);  // once it is stopping and no task of it is left
uint64_t shim_random(void);
int shim_share(struct shared_page* page);                   // a new page, locked
int shim_find(struct shared_page* page, const char* name);  // somebody's page
int shim_owner_lives(const struct shared_page* page);
void shim_leave(struct shared_page* page, int remove);
// memory.c
// Where `size` bytes at `at` of the buffer's memory are in this process; NULL where the peer does not allow it.
uint8_t* shim_reach(const struct doca_buf* buf, uint8_t* at, size_t size, uint32_t right, uint64_t domain);

#define ENTER(...)                             \
  do {                                         \
    shim_trace(__VA_ARGS__);                   \
    doca_error_t fault = shim_fault(__func__); \
    if (fault != SUCCESS) return fault;        \
  } while (0)

#endif
