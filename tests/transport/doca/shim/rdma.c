// RDMA contexts. A thread stands for the network card: it carries tasks out in the order of their submission, whether
// or not the program turns its progress engine, and posts their completions there.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "shim.h"

typedef void (*task_cb)(void* task, union doca_data task_data, union doca_data ctx_data);
typedef void (*event_cb)(void* connection, union doca_data own_data, union doca_data ctx_data);
typedef void (*request_cb)(void* connection, union doca_data ctx_data);

struct doca_rdma_connection {
  struct doca_rdma* rdma;
  struct shared_page own, peer;
  uint64_t peer_key;
  int broken;
};

struct doca_rdma {
  struct doca_ctx ctx;  // first: doca_rdma_as_ctx is a cast
  struct doca_dev* dev;
  uint32_t access;
  uint16_t connections;
  int send_queue;
  struct {
    task_cb done, failed;
    uint32_t most, made;
  } kinds[2];
  event_cb established, failed, ended;
  struct doca_rdma_connection* connection;
  void* blob;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  struct doca_task *first, *last, *lost;
  int stopping;
};

struct rdma_blob {
  char magic[8];
  char page[64];
  uint64_t key;
};
static const char kMagic[8] = "SHIMCON";

static int events_wanted(void) {
  const char* wanted = getenv("DOCA_SHIM_EVENTS");
  return wanted == NULL || strcmp(wanted, "0") != 0;
}

static void run_established(void* subject, int detail) {
  struct doca_rdma_connection* connection = subject;
  struct doca_rdma* rdma = connection->rdma;
  (void)detail;
  if (rdma->ctx.state == STARTING) rdma->ctx.state = RUNNING;
  if (events_wanted() && rdma->established != NULL)
    rdma->established(connection, (union doca_data){.u64 = 0}, rdma->ctx.user_data);
}

static void run_ended(void* subject, int detail) {
  struct doca_rdma_connection* connection = subject;
  (void)detail;
  if (events_wanted() && connection->rdma->ended != NULL)
    connection->rdma->ended(connection, (union doca_data){.u64 = 0}, connection->rdma->ctx.user_data);
}

static void run_done(void* subject, int status) {
  struct doca_task* task = subject;
  struct doca_rdma* rdma = (struct doca_rdma*)task->ctx;
  task->status = status;
  task->in_flight = 0;
  --rdma->ctx.in_flight;
  shim_trace("%s %llu %d", task->is_read ? "read" : "wrote", (unsigned long long)task->user_data.u64, status);
  task_cb call = status == SUCCESS ? rdma->kinds[task->is_read].done : rdma->kinds[task->is_read].failed;
  call(task, task->user_data, rdma->ctx.user_data);
}

// Whole words where both sides are aligned, in order, and the last one after all others.
static void copy(uint8_t* to, const uint8_t* from, size_t size) {
  if (((uintptr_t)to | (uintptr_t)from | size) % 8 != 0) {
    memcpy(to, from, size);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return;
  }
  const uint64_t* source = (const uint64_t*)from;
  uint64_t* target = (uint64_t*)to;
  for (size_t i = 0; i < size / 8; ++i) {
    __atomic_store_n(target + i, __atomic_load_n(source + i, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
  }
}

static int is_stopping(struct doca_rdma* rdma) {
  pthread_mutex_lock(&rdma->lock);
  int stopping = rdma->stopping;
  pthread_mutex_unlock(&rdma->lock);
  return stopping;
}

static int wait_for_peer(struct doca_rdma_connection* connection) {
  const char* wanted = getenv("DOCA_SHIM_RETRY_MS");
  int tries = wanted != NULL ? atoi(wanted) : 500;
  for (; tries >= 0 && shim_owner_lives(&connection->peer); --tries) {
    const struct page* page = connection->peer.page;
    if (__atomic_load_n(&page->key, __ATOMIC_SEQ_CST) != connection->peer_key) return 0;
    if (__atomic_load_n(&page->peer, __ATOMIC_SEQ_CST) == connection->own.page->key) return 1;
    if (is_stopping(connection->rdma)) return 0;
    nanosleep(&(struct timespec){0, 1000000}, NULL);
  }
  return 0;
}

static int is_down(void) {
  const char* file = getenv("DOCA_SHIM_DOWN");
  return file != NULL && access(file, F_OK) == 0;
}

static doca_error_t carry_out(struct doca_rdma_connection* connection, const struct doca_task* task) {
  if (connection->broken || is_down() || !wait_for_peer(connection)) return IO_FAILED;
  uint32_t right = task->is_read ? RDMA_READ : RDMA_WRITE;
  const struct page* peer = connection->peer.page;
  const struct doca_buf *source = task->source, *target = task->target;
  size_t size = source->data_size;
  if (target->data + size > target->address + target->size) return IO_FAILED;
  const uint8_t* from = shim_reach(source, source->data, size, right, peer->domain);
  uint8_t* to = shim_reach(target, target->data, size, right, peer->domain);
  if (from == NULL || to == NULL || (peer->access & right) == 0) return IO_FAILED;
  copy(to, from, size);
  task->target->data_size += size;
  return SUCCESS;
}

static int loses_work(void) { return getenv("DOCA_SHIM_LOSE") != NULL; }

static void* card(void* argument) {
  struct doca_rdma* rdma = argument;
  pthread_mutex_lock(&rdma->lock);
  while (1) {
    while (rdma->first == NULL && !rdma->stopping) pthread_cond_wait(&rdma->changed, &rdma->lock);
    struct doca_task* task = rdma->first;
    if (task == NULL) break;
    rdma->first = task->next;
    if (rdma->first == NULL) rdma->last = NULL;
    int stopping = rdma->stopping;
    if (!stopping && loses_work()) {
      task->next = rdma->lost;
      rdma->lost = task;
      continue;
    }
    pthread_mutex_unlock(&rdma->lock);
    doca_error_t status = stopping ? IO_FAILED : carry_out(rdma->connection, task);
    int broke = status != SUCCESS && !rdma->connection->broken;
    rdma->connection->broken |= broke;
    shim_post(rdma->ctx.pe, run_done, task, status);
    if (broke && !stopping) shim_post(rdma->ctx.pe, run_ended, rdma->connection, 0);
    pthread_mutex_lock(&rdma->lock);
  }
  for (; rdma->lost != NULL; rdma->lost = rdma->lost->next) shim_post(rdma->ctx.pe, run_done, rdma->lost, IO_FAILED);
  pthread_mutex_unlock(&rdma->lock);
  return NULL;
}

static doca_error_t start(struct doca_ctx* ctx) {
  struct doca_rdma* rdma = (struct doca_rdma*)ctx;
  const char* wanted = getenv("DOCA_SHIM_START");
  int later = wanted != NULL && strcmp(wanted, "connect") == 0;
  if (pthread_create(&rdma->thread, NULL, card, rdma) != 0) return OPERATING_SYSTEM;
  ctx->state = later ? STARTING : RUNNING;
  return later ? IN_PROGRESS : SUCCESS;
}

static doca_error_t submit(struct doca_task* task) {
  struct doca_rdma* rdma = (struct doca_rdma*)task->ctx;
  if (task->source->data != task->source_data || task->target->data != task->target_data)
    shim_abort("a task's buffers were aimed after they were set");
  if (task->source->data_size == 0 || task->target->data_size != 0) shim_abort("a task's buffers are not aimed");
  task->next = NULL;
  if (task->ctx->in_flight > rdma->send_queue) {
    task->in_flight = 0;
    --task->ctx->in_flight;
    return FULL;
  }
  pthread_mutex_lock(&rdma->lock);
  if (rdma->last != NULL) {
    rdma->last->next = task;
  } else {
    rdma->first = task;
  }
  rdma->last = task;
  pthread_cond_signal(&rdma->changed);
  pthread_mutex_unlock(&rdma->lock);
  return SUCCESS;
}

static void stop(struct doca_ctx* ctx) {
  struct doca_rdma* rdma = (struct doca_rdma*)ctx;
  pthread_mutex_lock(&rdma->lock);
  rdma->stopping = 1;
  pthread_cond_signal(&rdma->changed);
  pthread_mutex_unlock(&rdma->lock);
  pthread_join(rdma->thread, NULL);
  if (rdma->connection == NULL) return;
  shim_leave(&rdma->connection->own, 1);
  shim_leave(&rdma->connection->peer, 0);
}

doca_error_t doca_rdma_cap_task_write_is_supported(const struct doca_devinfo* info) {
  return info->can_rdma ? SUCCESS : NOT_SUPPORTED;
}

doca_error_t doca_rdma_cap_task_read_is_supported(const struct doca_devinfo* info) {
  return info->can_rdma ? SUCCESS : NOT_SUPPORTED;
}

// 127.0.0.N for RoCE v1 and then for v2, N counting devices from 1.
doca_error_t doca_rdma_cap_get_gid_table_size(const struct doca_devinfo* info, uint32_t* size) {
  (void)info;
  *size = 4;
  return SUCCESS;
}

doca_error_t doca_rdma_cap_get_gid(const struct doca_devinfo* info, uint32_t first, uint32_t count, uint8_t* gids) {
  if (first != 0 || count != 4) return INVALID_VALUE;
  memset(gids, 0, 16 * count);
  for (int i = 2; i < 4; ++i) memcpy(gids + 16 * i + 10, (uint8_t[]){0xff, 0xff, 127, 0, 0, info->number}, 6);
  return SUCCESS;
}

doca_error_t doca_rdma_create(struct doca_dev* dev, struct doca_rdma** made) {
  ENTER("doca_rdma_create");
  struct doca_rdma* rdma = calloc(1, sizeof(*rdma));
  rdma->dev = dev;
  ++dev->users;
  rdma->send_queue = 32;
  rdma->ctx.start = start;
  rdma->ctx.submit = submit;
  rdma->ctx.stop = stop;
  pthread_mutex_init(&rdma->lock, NULL);
  pthread_cond_init(&rdma->changed, NULL);
  *made = rdma;
  return SUCCESS;
}

doca_error_t doca_rdma_destroy(struct doca_rdma* rdma) {
  ENTER("doca_rdma_destroy");
  if (rdma->ctx.state != IDLE) return IN_USE;
  if (rdma->ctx.pe != NULL) --rdma->ctx.pe->contexts;
  --rdma->dev->users;
  free(rdma->connection);
  free(rdma->blob);
  free(rdma);
  return SUCCESS;
}

struct doca_ctx* doca_rdma_as_ctx(struct doca_rdma* rdma) { return &rdma->ctx; }

doca_error_t doca_rdma_set_permissions(struct doca_rdma* rdma, uint32_t access) {
  ENTER("doca_rdma_set_permissions %u", access);
  if (rdma->ctx.state != IDLE) return BAD_STATE;
  if ((access & ~(uint32_t)(RDMA_READ | RDMA_WRITE)) != 0) return INVALID_VALUE;
  rdma->access = access;
  return SUCCESS;
}

doca_error_t doca_rdma_set_gid_index(struct doca_rdma* rdma, uint32_t index) {
  ENTER("doca_rdma_set_gid_index %u", index);
  return rdma->ctx.state != IDLE ? BAD_STATE : SUCCESS;
}

doca_error_t doca_rdma_set_transport_type(struct doca_rdma* rdma, int type) {
  ENTER("doca_rdma_set_transport_type %d", type);
  return rdma->ctx.state != IDLE ? BAD_STATE : type == 0 ? SUCCESS : NOT_SUPPORTED;
}

doca_error_t doca_rdma_set_send_queue_size(struct doca_rdma* rdma, uint32_t size) {
  ENTER("doca_rdma_set_send_queue_size %u", size);
  rdma->send_queue = (int)size;
  return rdma->ctx.state != IDLE ? BAD_STATE : SUCCESS;
}

doca_error_t doca_rdma_set_max_num_connections(struct doca_rdma* rdma, uint16_t count) {
  ENTER("doca_rdma_set_max_num_connections %u", count);
  rdma->connections = count;
  return rdma->ctx.state != IDLE ? BAD_STATE : SUCCESS;
}

doca_error_t doca_rdma_set_connection_state_callbacks(struct doca_rdma* rdma, request_cb request, event_cb established,
                                                      event_cb failed, event_cb ended) {
  ENTER("doca_rdma_set_connection_state_callbacks %s", request == NULL ? "no requests" : "requests");
  rdma->established = established;
  rdma->failed = failed;
  rdma->ended = ended;
  return rdma->ctx.state != IDLE ? BAD_STATE : SUCCESS;
}

doca_error_t doca_rdma_export(struct doca_rdma* rdma, const void** blob, size_t* size,
                              struct doca_rdma_connection** connection) {
  ENTER("doca_rdma_export");
  if (rdma->ctx.state != RUNNING && rdma->ctx.state != STARTING) return BAD_STATE;
  if (rdma->connection != NULL) return FULL;
  struct doca_rdma_connection* made = calloc(1, sizeof(*made));
  made->rdma = rdma;
  if (shim_share(&made->own) != 0) return OPERATING_SYSTEM;
  *made->own.page = (struct page){.key = shim_random(), .domain = rdma->dev->domain, .access = rdma->access};
  struct rdma_blob* exported = calloc(1, sizeof(*exported));
  memcpy(exported->magic, kMagic, sizeof(kMagic));
  memcpy(exported->page, made->own.name, sizeof(exported->page));
  exported->key = made->own.page->key;
  rdma->blob = exported;
  rdma->connection = *connection = made;
  *blob = exported;
  *size = sizeof(*exported);
  return SUCCESS;
}

doca_error_t doca_rdma_connect(struct doca_rdma* rdma, const void* blob, size_t size,
                               struct doca_rdma_connection* connection) {
  ENTER("doca_rdma_connect %zu", size);
  const struct rdma_blob* from = blob;
  if (connection == NULL || connection->peer.page != NULL) return BAD_STATE;
  if (size != sizeof(*from) || memcmp(from->magic, kMagic, sizeof(kMagic)) != 0) return CONNECTION_ABORTED;
  if (shim_find(&connection->peer, from->page) != 0) connection->peer.page = NULL;
  connection->peer_key = from->key;
  __atomic_store_n(&connection->own.page->peer, from->key, __ATOMIC_SEQ_CST);
  shim_post(rdma->ctx.pe, run_established, connection, 0);
  return SUCCESS;
}

static doca_error_t configure(struct doca_rdma* rdma, int kind, task_cb done, task_cb failed, uint32_t most) {
  if (rdma->ctx.state != IDLE) return BAD_STATE;
  if (done == NULL || failed == NULL || most == 0) return INVALID_VALUE;
  rdma->kinds[kind].done = done;
  rdma->kinds[kind].failed = failed;
  rdma->kinds[kind].most = most;
  return SUCCESS;
}

static doca_error_t allocate(struct doca_rdma* rdma, int kind, struct doca_rdma_connection* connection,
                             const struct doca_buf* source, struct doca_buf* target, union doca_data data,
                             struct doca_task** made) {
  if (rdma->ctx.state != RUNNING || connection != rdma->connection) return BAD_STATE;
  if (source == NULL || target == NULL) return INVALID_VALUE;
  if (rdma->kinds[kind].made == rdma->kinds[kind].most) return NO_MEMORY;
  ++rdma->kinds[kind].made;
  ++rdma->ctx.tasks;
  struct doca_task* task = calloc(1, sizeof(*task));
  task->ctx = &rdma->ctx;
  task->is_read = kind;
  task->source = (struct doca_buf*)source;
  task->target = target;
  task->user_data = data;
  *made = task;
  return SUCCESS;
}

doca_error_t doca_rdma_task_write_set_conf(struct doca_rdma* rdma, task_cb done, task_cb failed, uint32_t most) {
  ENTER("doca_rdma_task_write_set_conf %u", most);
  return configure(rdma, 0, done, failed, most);
}

doca_error_t doca_rdma_task_read_set_conf(struct doca_rdma* rdma, task_cb done, task_cb failed, uint32_t most) {
  ENTER("doca_rdma_task_read_set_conf %u", most);
  return configure(rdma, 1, done, failed, most);
}

doca_error_t doca_rdma_task_write_allocate_init(struct doca_rdma* rdma, struct doca_rdma_connection* connection,
                                                const struct doca_buf* source, struct doca_buf* target,
                                                union doca_data data, struct doca_task** task) {
  ENTER("doca_rdma_task_write_allocate_init %llu", (unsigned long long)data.u64);
  return allocate(rdma, 0, connection, source, target, data, task);
}

doca_error_t doca_rdma_task_read_allocate_init(struct doca_rdma* rdma, struct doca_rdma_connection* connection,
                                               const struct doca_buf* source, struct doca_buf* target,
                                               union doca_data data, struct doca_task** task) {
  ENTER("doca_rdma_task_read_allocate_init %llu", (unsigned long long)data.u64);
  return allocate(rdma, 1, connection, source, target, data, task);
}

static void set_source(struct doca_task* task, struct doca_buf* buf) {
  task->source = buf;
  task->source_data = buf->data;
}

static void set_target(struct doca_task* task, struct doca_buf* buf) {
  task->target = buf;
  task->target_data = buf->data;
}

void doca_rdma_task_write_set_src_buf(struct doca_task* task, struct doca_buf* buf) { set_source(task, buf); }

void doca_rdma_task_write_set_dst_buf(struct doca_task* task, struct doca_buf* buf) { set_target(task, buf); }

void doca_rdma_task_read_set_src_buf(struct doca_task* task, struct doca_buf* buf) { set_source(task, buf); }

void doca_rdma_task_read_set_dst_buf(struct doca_task* task, struct doca_buf* buf) { set_target(task, buf); }

struct doca_task* doca_rdma_task_write_as_task(struct doca_task* task) { return task; }

struct doca_task* doca_rdma_task_read_as_task(struct doca_task* task) { return task; }
