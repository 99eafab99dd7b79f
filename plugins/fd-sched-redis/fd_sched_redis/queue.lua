-- The shared queue of one cell: every change of it is one call of this script, so it is atomic.
--
-- KEYS[1]: what all keys of the cell begin with; the part in braces keeps them on one server.
-- ARGV: operation, lease in ms, failures before a request is dead, random seed, mode (pull or
-- push), then the operation's own. Time is the server's, so clocks of hosts are never compared.
--
-- t:<id>     hash    an unfinished request: its record
-- q, q:<i>   zset    waiting requests for any instance, or for instance i; score: priority
-- wait       zset    waiting requests; score: when they have waited too long
-- own:<i>    set     requests that instance i holds
-- i:<i>      hash    an instance: epoch, earlier epochs, newest report
-- lease      zset    instances that may hold requests; score: when the lease ends
-- alive      zset    the same, only instances whose home is this cell
-- load:p, load:d     zset  prompt tokens, or requests, that instances still have before them
-- x:<i>      list    requests that instance i must stop: attempt, colon, id. The attempt is there since
--                     the instance may have been given the next one in the meantime
-- front, address     zset, hash  front ends: when their lease ends, where they listen
-- f:<f>      stream  what front end f has to know of its requests
-- early      zset    aborts that came before their request
-- wake, wake:<i>     list  one entry wakes one idle instance
-- fair       hash    by tenant: the place in line of its next request
-- n          hash    counters
-- ended, dead        stream  how requests ended; requests that failed too often, whole

local prefix, op = KEYS[1], ARGV[1]
local lease_ms, max_failures = tonumber(ARGV[2]), tonumber(ARGV[3])
local is_push = ARGV[5] == 'push'
local call = redis.call
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
math.randomseed(tonumber(ARGV[4]))

local EARLY_MS, MAX_EARLY = 60000, 4096
local FRESH_MS = 100        -- older load reports are not believed to the last token
local MAX_WAKES = 64
local KEEP_INSTANCE_MS = 3600000
local MAX_ATTEMPT = 2^31
local KEPT_ENDINGS, KEPT_DEAD, KEPT_NOTICES = 100000, 1000, 100000

local function key(name) return prefix .. name end

local function is_alive(kind, name)
  local ends = call('ZSCORE', key(kind), name)
  return ends and tonumber(ends) > now
end

-- What happened to a request. A front end whose lease ended asks itself when it is back.
local function tell(front, what, id, attempt)
  if is_alive('front', front) then
    call('XADD', key('f:' .. front), 'MAXLEN', '~', KEPT_NOTICES, '*', 'what', what, 'id', id,
      'attempt', attempt)
  end
end

local function record_end(id, how, attempt)
  call('XADD', key('ended'), 'MAXLEN', '~', KEPT_ENDINGS, '*', 'id', id, 'how', how,
    'attempt', attempt)
  call('HINCRBY', key('n'), how, 1)
end

local function stop_at(instance, id, attempt)
  if instance ~= '' then call('RPUSH', key('x:' .. instance), attempt .. ':' .. id) end
end

local function wake(instance)
  local list = instance and key('wake:' .. instance) or key('wake')
  if call('LLEN', list) < (instance and 1 or MAX_WAKES) then call('RPUSH', list, '1') end
end

-- The instance that gets a request in push mode: a random one among those with little load. Where
-- reports are old, the less loaded of two random ones, since many would run to the same minimum.
local function pick(tokens)
  for _, kind in ipairs({'load:p', 'load:d'}) do
    local loads = key(kind)
    for _ = 1, 16 do
      local low = call('ZRANGE', loads, 0, 0, 'WITHSCORES')
      if #low == 0 then break end
      local count, chosen = call('ZCARD', loads), nil
      local reported = tonumber(call('HGET', key('i:' .. low[1]), 'at') or 0)
      if now - reported <= FRESH_MS then
        local width = math.min(count, 10)
        if kind == 'load:p' then width = math.max(100, math.min(500, tokens / 2)) end
        local num_low = call('ZCOUNT', loads, '-inf', tonumber(low[2]) + width)
        local place = math.random(0, num_low - 1)
        chosen = call('ZRANGE', loads, place, place)[1]
      else
        local one, two = math.random(0, count - 1), math.random(0, count - 1)
        local place = math.min(one, two)  -- places are in order of load
        chosen = call('ZRANGE', loads, place, place)[1]
      end
      if is_alive('alive', chosen) then return chosen, kind end
      call('ZREM', loads, chosen)
    end
  end
  return nil
end

-- Put a request's id in line.
local function line_up(id, tokens, member, priority, deadline)
  local instance, kind = nil, nil
  if is_push then instance, kind = pick(tokens) end
  local at = instance and (':' .. instance) or ''
  call('ZADD', key('q' .. at), priority, member)
  call('HSET', key('t:' .. id), 'at', at, 'owner', '')
  call('ZADD', key('wait'), deadline, id)
  call('HINCRBY', key('n'), 'tokens', tokens)
  if instance then
    call('HINCRBY', key('i:' .. instance), 'queued', kind == 'load:p' and tokens or 1)
    call('ZINCRBY', key(kind), kind == 'load:p' and tokens or 1, instance)
  end
  wake(instance)
end

-- Take a waiting request out of line.
local function leave_line(id, at, member, tokens)
  call('ZREM', key('q' .. at), member)
  call('ZREM', key('wait'), id)
  call('HINCRBY', key('n'), 'tokens', -tokens)
  if at ~= '' then
    local instance = key('i' .. at)
    local is_decode = call('HGET', instance, 'role') == 'decode'
    call('HINCRBY', instance, 'queued', is_decode and -1 or -tokens)
  end
end

-- Forget a request, wherever it is; its record must exist.
local function forget(id)
  local r = call('HMGET', key('t:' .. id), 'owner', 'at', 'member', 'tokens')
  if r[1] ~= '' then
    call('SREM', key('own:' .. r[1]), id)
  else
    leave_line(id, r[2], r[3], tonumber(r[4]) or 0)
  end
  call('DEL', key('t:' .. id))
end

-- A record whose numbers were spoilt would stop everything behind it.
local function is_sound(id)
  local r = call('HMGET', key('t:' .. id), 'tokens', 'deadline', 'attempt', 'queued', 'priority',
    'failures')
  for n = 1, 6 do
    if not r[n] or not string.match(r[n], '^%-?%d+$') or #r[n] > 20 then return false end
  end
  return true
end

local function put_spoilt_aside(id)
  local r = call('HMGET', key('t:' .. id), 'front', 'owner')
  call('ZREM', key('wait'), id)
  if r[2] then call('SREM', key('own:' .. r[2]), id) end
  if call('DEL', key('t:' .. id)) == 1 then
    if r[1] then tell(r[1], 'dead', id, MAX_ATTEMPT) end
    record_end(id, 'dead', 0)
  end
end

local function expire(id)
  if not is_sound(id) then return put_spoilt_aside(id) end
  local r = call('HMGET', key('t:' .. id), 'front', 'attempt')
  forget(id)
  tell(r[1], 'expired', id, r[2])
  record_end(id, 'expired', r[2])
end

-- A held request goes back to its old place in line, or, after too many failures, nowhere.
local function give_back(id, has_failed)
  local name = key('t:' .. id)
  local r = call('HMGET', name, 'front', 'attempt', 'tokens', 'member', 'priority', 'deadline',
    'owner')
  if not is_sound(id) then return put_spoilt_aside(id) end
  call('SREM', key('own:' .. r[7]), id)
  local failures = has_failed and call('HINCRBY', name, 'failures', 1) or 0
  if failures >= max_failures then
    local body = call('HGET', name, 'body')
    call('XADD', key('dead'), 'MAXLEN', '~', KEPT_DEAD, '*', 'id', id, 'attempt', r[2],
      'body', body)
    call('DEL', name)
    tell(r[1], 'dead', id, r[2])
    record_end(id, 'dead', r[2])
    return
  end
  line_up(id, tonumber(r[3]), r[4], r[5], r[6])
  tell(r[1], 'lost', id, r[2])
end

-- What waits for this instance alone gets another one, and nothing more comes.
local function close_line(instance)
  call('ZREM', key('load:p'), instance)
  call('ZREM', key('load:d'), instance)
  local line = key('q:' .. instance)
  for _, member in ipairs(call('ZRANGE', line, 0, -1)) do
    local id = string.sub(member, 30)
    local r = call('HMGET', key('t:' .. id), 'tokens', 'priority', 'deadline')
    call('ZREM', line, member)
    if r[1] then
      call('HINCRBY', key('n'), 'tokens', -tonumber(r[1]))
      line_up(id, tonumber(r[1]), member, r[2], r[3])
    end
  end
  call('HSET', key('i:' .. instance), 'queued', 0)
end

local function end_epoch(instance, has_failed)
  local name = key('i:' .. instance)
  local epoch = call('HGET', name, 'epoch')
  if epoch and epoch ~= '' then
    local past = call('HGET', name, 'past') or ''
    call('HSET', name, 'past', string.sub(past .. '|' .. epoch .. '|', -1000), 'epoch', '')
  end
  call('HDEL', name, 'ask', 'asked')
  close_line(instance)
  for _, id in ipairs(call('SMEMBERS', key('own:' .. instance))) do give_back(id, has_failed) end
  call('DEL', key('own:' .. instance), key('x:' .. instance), key('wake:' .. instance))
end

-- Renew an instance's lease. 'new': it held nothing until now. 'fenced': this epoch has lost
-- everything and may not come back; 'replaced': and another one is there.
local function enter(instance, epoch, is_foreign)
  local name = key('i:' .. instance)
  local r = call('HMGET', name, 'epoch', 'past')
  local answer = 'ok'
  if r[1] ~= epoch then
    if string.find(r[2] or '', '|' .. epoch .. '|', 1, true) then
      return (r[1] and r[1] ~= '') and 'replaced' or 'fenced'
    end
    if r[1] and r[1] ~= '' then end_epoch(instance, true) end
    call('HSET', name, 'epoch', epoch)
    call('PERSIST', name)
    answer = 'new'
  end
  call('ZADD', key('lease'), now + lease_ms, instance)
  if not is_foreign then call('ZADD', key('alive'), now + lease_ms, instance) end
  return answer
end

local function head(line)
  local first = call('ZRANGE', line, 0, 0, 'WITHSCORES')
  if #first == 0 then return nil end
  return {line = line, member = first[1], priority = tonumber(first[2])}
end

local function next_in_line(instance, is_foreign)
  local any = head(key('q'))
  if is_foreign then return any end
  local own = head(key('q:' .. instance))
  if not own or not any then return own or any end
  if own.priority ~= any.priority then return own.priority < any.priority and own or any end
  return own.member < any.member and own or any
end

local function as_taken(id)
  local r = call('HMGET', key('t:' .. id), 'attempt', 'queued', 'taken', 'front', 'body')
  local address = call('HGET', key('address'), r[4]) or ''
  return {id, r[1], r[3] - r[2], r[4], address, r[5]}
end

local ops = {}

function ops.submit(front, id, nonce, tokens, priority, tenant, wait_ms, max_size, max_tokens,
    first_attempt, body)
  local name, counters = key('t:' .. id), key('n')
  tokens, max_size, max_tokens = tonumber(tokens), tonumber(max_size), tonumber(max_tokens)
  local attempt, failures, member = tonumber(first_attempt), 0, nil
  local known = call('HMGET', name, 'front', 'nonce', 'attempt', 'owner', 'failures', 'member')
  if known[1] then
    if known[1] == front and known[2] == nonce then return {'ok'} end
    if known[1] ~= front and not is_alive('front', known[1]) then
      -- Its front end died: whoever puts it again takes it over. That takes a lease each time, so
      -- front ends that die fast have it run once a lease at most. It stands where it stood, else it
      -- would never come to its turn; and what kills instances does not get new ones in this way.
      failures, member = known[5], known[6]
      attempt = math.max(attempt, tonumber(known[3]))
      stop_at(known[4], id, known[3])
      forget(id)
      record_end(id, 'taken_over', attempt)
    else
      return {'duplicate'}
    end
  end
  local num_waiting = call('ZCARD', key('wait'))
  if max_size > 0 and num_waiting >= max_size then return {'full', num_waiting} end
  local num_tokens = tonumber(call('HGET', counters, 'tokens') or 0) + tokens
  if max_tokens > 0 and num_waiting > 0 and num_tokens > max_tokens then
    return {'full_tokens', num_tokens}
  end
  call('HINCRBY', counters, 'submitted', 1)
  if call('ZREM', key('early'), id) == 1 then
    record_end(id, 'cancelled', attempt)
    return {'cancelled'}
  end
  if not member then
    -- Tenants take turns by prompt tokens: a request stands where its tenant's last one ended.
    local start = math.max(tonumber(call('HGET', counters, 'served') or 0),
      tonumber(call('HGET', key('fair'), tenant) or 0))
    call('HSET', key('fair'), tenant, start + tokens + 1)
    local number = call('HINCRBY', counters, 'number', 1)
    member = string.format('%015.0f:%012.0f:', start, number) .. id
  end
  local deadline = now + tonumber(wait_ms)
  call('HSET', name, 'front', front, 'nonce', nonce, 'tokens', tokens, 'priority', priority,
    'member', member, 'attempt', attempt, 'failures', failures, 'queued', now, 'deadline', deadline,
    'body', body)
  line_up(id, tokens, member, priority, deadline)
  return {'ok'}
end

function ops.take(instance, epoch, ask, num_requests, num_blocks, block_size, num_tokens,
    total_blocks, min_waiting, foreign)
  local is_foreign = foreign == '1'
  local answer = enter(instance, epoch, is_foreign)
  if answer == 'fenced' or answer == 'replaced' then return {answer} end
  local name, taken = key('i:' .. instance), {}
  local asked = call('HMGET', name, 'ask', 'asked')
  if asked[1] == ask then
    -- The answer to this very question was lost on its way.
    for _, id in ipairs(cjson.decode(asked[2])) do
      if call('SISMEMBER', key('own:' .. instance), id) == 1 then
        taken[#taken + 1] = as_taken(id)
      end
    end
    return {answer, taken}
  end
  if is_foreign and call('ZCARD', key('q')) < tonumber(min_waiting)
      and call('ZCOUNT', key('alive'), now, '+inf') > 0 then
    return {answer, taken}
  end
  num_blocks, num_tokens = tonumber(num_blocks), tonumber(num_tokens)
  total_blocks = tonumber(total_blocks)
  local ids, served = {}, nil
  while #taken < tonumber(num_requests) do
    local first = next_in_line(instance, is_foreign)
    if not first then break end
    local id = string.sub(first.member, 30)
    local record = key('t:' .. id)
    local r = call('HMGET', record, 'tokens', 'deadline', 'at')
    if not is_sound(id) then
      call('ZREM', first.line, first.member)
      put_spoilt_aside(id)
    elseif tonumber(r[2]) <= now then
      expire(id)
    else
      local tokens = tonumber(r[1])
      local need = math.floor(tokens / tonumber(block_size)) + 1
      -- One that can never run here is handed out all the same: the engine says so to the client.
      local can_never_run = total_blocks > 0 and need > total_blocks
      if tokens > num_tokens or (need > num_blocks and not can_never_run) then break end
      if not can_never_run then num_blocks = num_blocks - need end
      num_tokens = num_tokens - tokens
      leave_line(id, r[3], first.member, tokens)
      call('ZREM', first.line, first.member)  -- whatever its record says
      call('HINCRBY', record, 'attempt', 1)
      call('HSET', record, 'owner', instance, 'taken', now)
      call('SADD', key('own:' .. instance), id)
      served = tonumber(string.sub(first.member, 1, 15))
      ids[#ids + 1] = id
      taken[#taken + 1] = as_taken(id)
    end
  end
  if #ids > 0 then
    call('HSET', name, 'ask', ask, 'asked', cjson.encode(ids))
    if call('ZCARD', key('wait')) == 0 then
      call('DEL', key('fair'), key('wake'))
      call('HDEL', key('n'), 'served')
    elseif served > tonumber(call('HGET', key('n'), 'served') or 0) then
      call('HSET', key('n'), 'served', served)
    end
  end
  return {answer, taken}
end

-- An instance lives. tokens, requests: prompts it has not computed yet, and requests it has.
function ops.beat(instance, epoch, foreign, draining, role, tokens, requests, report, version)
  local is_foreign = foreign == '1'
  local answer = enter(instance, epoch, is_foreign)
  if answer == 'fenced' or answer == 'replaced' then return {answer} end
  local name = key('i:' .. instance)
  if not is_foreign then
    call('HSET', name, 'report', report, 'at', now, 'role', role)
    if draining == '1' then
      close_line(instance)
    elseif is_push then
      local queued = tonumber(call('HGET', name, 'queued') or 0)
      local kind, load = 'load:p', tonumber(tokens)
      if role == 'decode' then kind, load = 'load:d', tonumber(requests) end
      call('ZADD', key(kind), load + queued, instance)
      call('ZREM', key(kind == 'load:p' and 'load:d' or 'load:p'), instance)
    end
  end
  local aborts = call('LRANGE', key('x:' .. instance), 0, -1)
  if #aborts > 0 then call('DEL', key('x:' .. instance)) end
  local newest, fronts = call('HGET', key('n'), 'fronts') or '0', {}
  if newest ~= version then fronts = call('HGETALL', key('address')) end
  return {answer, call('ZCARD', key('wait')), aborts, newest, fronts}
end

-- Of each request and attempt: 0 another attempt, 1 held, 2 held and its front end is dead, 3 gone.
function ops.held(instance, ...)
  local asked, answers = {...}, {}
  for n = 1, #asked, 2 do
    local r = call('HMGET', key('t:' .. asked[n]), 'owner', 'attempt', 'front')
    local answer = 0
    if not r[1] then
      answer = 3
    elseif r[1] == instance and r[2] == asked[n + 1] then
      answer = is_alive('front', r[3]) and 1 or 2
    end
    answers[#answers + 1] = answer
  end
  return answers
end

-- What this instance was given and has not begun stands where it stood.
function ops.give_back(instance, ...)
  local asked = {...}
  for n = 1, #asked, 2 do
    local r = call('HMGET', key('t:' .. asked[n]), 'owner', 'attempt')
    if r[1] == instance and r[2] == asked[n + 1] then give_back(asked[n], false) end
  end
  return {'ok'}
end

function ops.leave(instance, epoch)
  if call('HGET', key('i:' .. instance), 'epoch') ~= epoch then return {'fenced'} end
  end_epoch(instance, false)
  call('ZREM', key('lease'), instance)
  call('ZREM', key('alive'), instance)
  call('PEXPIRE', key('i:' .. instance), KEEP_INSTANCE_MS)
  return {'ok'}
end

-- The only way to a regular end. Only the newest attempt can end a request.
function ops.complete(id, attempt, how)
  local current = call('HGET', key('t:' .. id), 'attempt')
  if not current then return {'gone'} end
  if current ~= attempt then return {'stale'} end
  forget(id)
  record_end(id, how, attempt)
  return {'ok'}
end

-- End a request; returns who holds it. A branch ("id#2") is only passed on.
function ops.cancel(front, id, branch)
  local r = call('HMGET', key('t:' .. id), 'owner', 'attempt', 'front')
  if branch ~= '' then
    if r[1] then stop_at(r[1], branch, r[2]) end
    return {r[1] or ''}
  end
  if not r[1] then
    call('ZADD', key('early'), now, id)
    call('ZREMRANGEBYSCORE', key('early'), '-inf', now - EARLY_MS)
    call('ZREMRANGEBYRANK', key('early'), 0, -MAX_EARLY - 1)
    return {''}
  end
  stop_at(r[1], id, r[2])
  forget(id)
  record_end(id, 'cancelled', r[2])
  if r[3] ~= front then tell(r[3], 'cancelled', id, r[2]) end
  return {r[1]}
end

-- A front end lives; cursor is the last notice that it has. Returns what is new for it.
function ops.front_beat(front, address, cursor)
  local is_new = not call('ZSCORE', key('front'), front)
  call('ZADD', key('front'), now + lease_ms, front)
  if is_new then
    call('HSET', key('address'), front, address)
    call('HINCRBY', key('n'), 'fronts', 1)
  end
  local notices, stream = {}, key('f:' .. front)
  if call('EXISTS', stream) == 1 then
    if cursor ~= '0-0' then
      local ms, number = string.match(cursor, '(%d+)-(%d+)')
      call('XTRIM', stream, 'MINID', string.format('%s-%d', ms, tonumber(number) + 1))
    end
    notices = call('XRANGE', stream, '(' .. cursor, '+', 'COUNT', 1000)
  end
  return {is_new and 1 or 0, call('ZCARD', key('wait')),
    call('ZCOUNT', key('alive'), now, '+inf'), notices}
end

local function end_front(front)
  call('ZREM', key('front'), front)
  call('HDEL', key('address'), front)
  call('DEL', key('f:' .. front))
  call('HINCRBY', key('n'), 'fronts', 1)
end

function ops.front_leave(front)
  end_front(front)
  return {'ok'}
end

-- Whether these requests of a front end are still known.
function ops.known(front, ...)
  local answers = {}
  for n, id in ipairs({...}) do
    answers[n] = call('HGET', key('t:' .. id), 'front') == front and 1 or 0
  end
  return answers
end

-- Give back what dead instances held; answer what waited too long; forget dead front ends.
function ops.sweep(may_reap)
  local num = 0
  if may_reap == '1' then
    local over = call('ZRANGEBYSCORE', key('lease'), '-inf', now, 'LIMIT', 0, 10)
    for _, instance in ipairs(over) do
      end_epoch(instance, true)
      call('ZREM', key('lease'), instance)
      call('ZREM', key('alive'), instance)
      call('PEXPIRE', key('i:' .. instance), KEEP_INSTANCE_MS)
      num = num + 1
    end
    for _, front in ipairs(call('ZRANGEBYSCORE', key('front'), '-inf', now, 'LIMIT', 0, 10)) do
      end_front(front)
    end
  end
  for _, id in ipairs(call('ZRANGEBYSCORE', key('wait'), '-inf', now, 'LIMIT', 0, 100)) do
    expire(id)
  end
  return {num}
end

function ops.loads()
  local found = {}
  for _, instance in ipairs(call('ZRANGEBYSCORE', key('alive'), now, '+inf')) do
    local r = call('HMGET', key('i:' .. instance), 'report', 'at')
    if r[1] then found[#found + 1] = {r[1], now - r[2]} end
  end
  return found
end

table.remove(ARGV, 1)
return ops[op](unpack(ARGV, 5))
