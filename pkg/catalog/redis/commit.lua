-- One batch of commits, applied in order. For each commit: parse, check everything, then write.
-- Nothing between the first write of a commit and its last can fail, since a script is not
-- rolled back: Redis refuses for memory, disk or role only at a script's first write.
--
-- The format of ARGV is that of encodeBatch; the layout of the keys is in keys.go.
local call, fmt = redis.call, string.format
local P, tomb_ms, maxlen = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local ahead_ms, MARK = tonumber(ARGV[4]), tonumber(ARGV[5])
local seen_seq, seen_digest = tonumber(ARGV[6]), ARGV[7]
local sender = ARGV[8]
local count, pos = tonumber(ARGV[9]), 9

local function take()
  pos = pos + 1
  return ARGV[pos]
end

local function whole(n) return fmt('%.0f', n) end

local clock = call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
local now_s = whole(now)
local granted = call('HMGET', P .. 'leader', 'e', 'h')
local leader, holder = granted[1] or '0', granted[2] or ''
local suspended = call('EXISTS', P .. 'suspended') == 1
local chain = call('GET', P .. 'digest') or ''

-- Who has seen more than is here is talking to a server that came back older.
local here = tonumber(call('GET', P .. 'seq') or '0')
local rewound = here < seen_seq or (here == seen_seq and chain ~= seen_digest and seen_digest ~= '')
if here > seen_seq and seen_digest ~= '' then -- others have written since, or it has grown past what it lost
  local then_ = call('XRANGE', P .. 'log', whole(seen_seq) .. '-0', whole(seen_seq) .. '-0')[1]
  local fields = then_ and then_[2] or {}
  for i = 1, #fields, 2 do
    if fields[i] == 'h' and fields[i + 1] ~= seen_digest then rewound = true end
  end
end

local function split(key) return string.match(key, '^([^/]+)/([^/]+)/(.+)$') end

-- short is kind/uid, as refusals name a record.
local function short(key) return string.match(key, '^[^/]+/(.+)$') end

local function uid_of(key) return string.match(key, '([^/]+)$') end

local function parse_refs(s)
  local refs = {}
  for mode, target in string.gmatch(s, '(%a) (%S+)') do refs[target] = mode end
  return refs
end

local function parse()
  local c = {
    id = take(), tenant = take(), digest = take(), minted = tonumber(take()), life = take(),
    attempt = take(), repair = take(),
    epoch = take(), node = take(), session = take(), result = take(),
    checks = {}, puts = {}, deletes = {}, by_key = {}, names = {}, claims = {},
  }
  for i = 1, tonumber(take()) do
    c.checks[i] = { cond = take(), key = take(), arg = take() }
  end
  for i = 1, tonumber(take()) do
    local p = {
      key = take(), expect = take(), name = take(), phase = take(), node = take(),
      identity = take(), sealed = take(), refs = take(), body = take(), force = take(),
    }
    c.puts[i] = p
    c.by_key[p.key] = p
  end
  for i = 1, tonumber(take()) do
    c.deletes[i] = { key = take(), expect = take(), tombstone = take(), body = take() }
  end
  return c
end

local function stale(key, expect, has)
  return { 'STALE_REVISION', 'uid', uid_of(key), 'revision', expect, 'current_revision', has }
end

local function gone(key) return { 'STALE_UID', 'uid', uid_of(key), 'current_uid', '' } end

local function referenced(key)
  local n = call('ZCARD', P .. 'f:' .. key)
  if n == 0 then return nil end
  local names = {}
  for i, h in ipairs(call('ZRANGE', P .. 'f:' .. key, 0, 9)) do names[i] = short(h) end
  return { 'STILL_REFERENCED', 'uid', uid_of(key), 'references', table.concat(names, ','), 'count', tostring(n) }
end

local function check_owner(c)
  if c.epoch ~= leader or leader == '0' then
    return { 'FENCED', 'epoch', c.epoch, 'current_epoch', leader }
  end
  -- A server that came back older may have granted an epoch for a second time.
  if sender ~= '' and sender ~= holder then
    return { 'FENCED', 'epoch', c.epoch, 'current_epoch', leader, 'leader', holder }
  end
  if c.node ~= '' then
    local session = call('HGET', P .. 'sessions', c.node) or '0'
    if c.session ~= session or session == '0' then
      return { 'FENCED', 'epoch', c.session, 'current_epoch', session, 'node', c.node }
    end
  end
end

local function check(k)
  if k.cond == 'revision' then
    local has = call('HGET', P .. 'r:' .. k.key, 'v') or '0'
    if has ~= k.arg then return stale(k.key, k.arg, has) end
  elseif k.cond == 'phase' then
    local phase = call('HGET', P .. 'r:' .. k.key, 'p')
    if not phase then return gone(k.key) end
    if not string.find(' ' .. k.arg .. ' ', ' ' .. phase .. ' ', 1, true) then
      return { 'WRONG_PHASE', 'uid', uid_of(k.key), 'phase', phase }
    end
  elseif k.cond == 'identity' then
    local has = call('HGET', P .. 'r:' .. k.key, 'i')
    if not has then return gone(k.key) end
    if has ~= k.arg then return { 'IDENTITY_MISMATCH', 'uid', uid_of(k.key), 'want', k.arg, 'has', has } end
  elseif k.cond == 'named' then
    local tenant, kind, uid = split(k.key)
    local has = call('HGET', P .. 'n:' .. tenant .. '/' .. kind, k.arg) or ''
    if has ~= uid then return { 'STALE_UID', 'uid', uid, 'current_uid', has } end
  elseif k.cond == 'unreferenced' then
    return referenced(k.key)
  end
end

-- check_ref looks at one reference that the put adds or changes.
local function check_ref(c, p, target, mode)
  if not p.old_refs[target] then
    local sealed, phase
    local made = c.by_key[target]
    if made then
      sealed, phase = made.sealed, made.phase
    else
      local t = call('HMGET', P .. 'r:' .. target, 'v', 'x', 'p')
      if not t[1] then return gone(target) end
      sealed, phase = t[2], t[3]
    end
    if sealed == '1' and c.repair ~= '1' then return { 'WRONG_PHASE', 'uid', uid_of(target), 'phase', phase } end
  end
  if mode == 'r' then return nil end
  local holder
  local rivals
  if mode == 'e' then
    rivals = call('ZRANGE', P .. 'a:' .. target, 0, 1)
  else
    rivals = call('ZRANGEBYSCORE', P .. 'a:' .. target, 2, 2, 'LIMIT', 0, 1)
  end
  for _, r in ipairs(rivals) do
    if r ~= p.key then holder = holder or r end
  end
  local claim = c.claims[target]
  if not holder and claim and (mode == 'e' or claim.mode == 'e') then holder = claim.key end
  if holder then return { 'ALREADY_ATTACHED', 'volume', uid_of(target), 'holder', short(holder) } end
  c.claims[target] = { mode = mode, key = p.key }
end

local function check_put(c, p)
  local has = call('HMGET', P .. 'r:' .. p.key, 'v', 'n', 'o', 'i', 'r', 'c')
  local revision = has[1] or '0'
  if revision ~= p.expect then return stale(p.key, p.expect, revision) end
  p.tenant, p.kind, p.uid = split(p.key)
  p.old_name, p.old_node, p.created = has[2] or '', has[3] or '', has[6] or now_s
  p.revision = p.force ~= '' and p.force or whole(tonumber(revision) + 1)
  if has[4] and has[4] ~= '' and has[4] ~= p.identity then
    return { 'IDENTITY_MISMATCH', 'uid', p.uid, 'want', p.identity, 'has', has[4] }
  end
  if p.name ~= '' and p.name ~= p.old_name then
    local scope = p.tenant .. '/' .. p.kind
    local slot = scope .. '/' .. p.name
    local owner = c.names[slot] or call('HGET', P .. 'n:' .. scope, p.name)
    if owner then return { 'NAME_TAKEN', 'name', p.name, 'uid', owner } end
    c.names[slot] = p.uid
  end
  if p.refs == (has[5] or '') then return nil end
  p.old_refs, p.new_refs = parse_refs(has[5] or ''), parse_refs(p.refs)
  -- In the order given, so that the first conflict is the one reported.
  for mode, target in string.gmatch(p.refs, '(%a) (%S+)') do
    if p.old_refs[target] ~= mode then
      local refused = check_ref(c, p, target, mode)
      if refused then return refused end
    end
  end
end

local function check_delete(d)
  local has = call('HMGET', P .. 'r:' .. d.key, 'v', 'n', 'o', 'r')
  local revision = has[1] or '0'
  if revision ~= d.expect then return stale(d.key, d.expect, revision) end
  d.tenant, d.kind, d.uid = split(d.key)
  d.name, d.node, d.refs = has[2], has[3], has[4]
  return referenced(d.key)
end

local function first_refusal(c)
  for _, k in ipairs(c.checks) do
    local refused = check(k)
    if refused then return refused end
  end
  for _, p in ipairs(c.puts) do
    local refused = check_put(c, p)
    if refused then return refused end
  end
  for _, d in ipairs(c.deletes) do
    local refused = check_delete(d)
    if refused then return refused end
  end
end

local function drop_ref(holder, target)
  call('ZREM', P .. 'f:' .. target, holder)
  call('ZREM', P .. 'a:' .. target, holder)
end

local function write_put(p, seq)
  local member = p.uid .. '/' .. p.tenant
  local scope = p.tenant .. '/' .. p.kind
  call('HSET', P .. 'r:' .. p.key, 'n', p.name, 'v', p.revision, 's', seq, 'p', p.phase, 'o', p.node,
    'i', p.identity, 'x', p.sealed, 'r', p.refs, 'b', p.body, 'c', p.created, 'u', now_s)
  if p.expect == '0' then
    call('ZADD', P .. 'i:' .. scope, 0, p.uid)
    call('ZADD', P .. 'k:' .. p.kind, 0, member)
  end
  if p.node ~= p.old_node then
    if p.old_node ~= '' then call('ZREM', P .. 'o:' .. p.old_node .. '/' .. p.kind, member) end
    if p.node ~= '' then call('ZADD', P .. 'o:' .. p.node .. '/' .. p.kind, 0, member) end
  end
  if p.name ~= p.old_name then
    if p.old_name ~= '' then call('HDEL', P .. 'n:' .. scope, p.old_name) end
    if p.name ~= '' then call('HSET', P .. 'n:' .. scope, p.name, p.uid) end
  end
  if not p.new_refs then return end
  for target in pairs(p.old_refs) do
    if not p.new_refs[target] then drop_ref(p.key, target) end
  end
  for target, mode in pairs(p.new_refs) do
    if p.old_refs[target] ~= mode then
      call('ZADD', P .. 'f:' .. target, 0, p.key)
      if mode == 'r' then
        call('ZREM', P .. 'a:' .. target, p.key)
      else
        call('ZADD', P .. 'a:' .. target, mode == 'e' and 2 or 1, p.key)
      end
    end
  end
end

local function write_delete(d, seq)
  local member = d.uid .. '/' .. d.tenant
  local scope = d.tenant .. '/' .. d.kind
  call('DEL', P .. 'r:' .. d.key)
  call('ZREM', P .. 'i:' .. scope, d.uid)
  call('ZREM', P .. 'k:' .. d.kind, member)
  if d.node ~= '' then call('ZREM', P .. 'o:' .. d.node .. '/' .. d.kind, member) end
  if d.name ~= '' then call('HDEL', P .. 'n:' .. scope, d.name) end
  for target in pairs(parse_refs(d.refs)) do drop_ref(d.key, target) end
  if d.tombstone == '1' then
    call('ZREMRANGEBYLEX', P .. 't:' .. scope, '[' .. d.uid .. ' ', '(' .. d.uid .. '!')
    call('ZADD', P .. 't:' .. scope, 0, table.concat({ d.uid, d.expect, seq, now_s, whole(tomb_ms), d.body }, ' '))
    -- Where the retention was shortened, or the clock set back, those before have longer to go: this one is forgotten after them.
    local line = redis.pcall('XADD', P .. 'tl', whole(now + tomb_ms) .. '-*', 'k', d.key)
    if type(line) == 'table' then call('XADD', P .. 'tl', '*', 'k', d.key) end
  end
end

local function apply(c)
  local refused = check_owner(c)
  if refused then return refused end
  local receipt = P .. 'c:' .. c.tenant .. '/' .. c.id
  if c.id ~= '' then
    local raw = call('GET', receipt)
    if raw then
      if string.match(raw, '^([^\n]*)\n') ~= c.digest then return { 'OPERATION_BODY_MISMATCH' } end
      return { '=', raw }
    end
  end
  if c.attempt ~= '' and call('EXISTS', P .. 'd:' .. c.attempt) == 1 then return { 'ATTEMPT_VOID' } end
  if c.id ~= '' and c.minted > 0 and now - c.minted > tonumber(c.life) then return { 'OPERATION_EXPIRED' } end
  if rewound and c.repair ~= '1' then return { 'CATALOG_REWOUND' } end
  if suspended ~= (c.repair == '1') then
    if suspended then return { 'CATALOG_REWOUND' } end
    return { 'WRONG_PHASE', 'uid', 'catalog', 'phase', 'in service' }
  end
  refused = first_refusal(c)
  if refused then return refused end

  local seq = whole(call('INCR', P .. 'seq'))
  local revisions = {}
  local items = {}
  for i, p in ipairs(c.puts) do
    write_put(p, seq)
    revisions[i] = p.key .. ' ' .. p.revision
    items[#items + 1] = 'p ' .. p.key .. ' ' .. p.revision .. ' ' .. p.phase .. ' ' .. p.node .. '\n'
  end
  for _, d in ipairs(c.deletes) do
    write_delete(d, seq)
    items[#items + 1] = 'd ' .. d.key .. ' ' .. d.expect .. '  ' .. d.node .. '\n'
  end
  local changes = table.concat(items)
  -- The attempt is of this sending alone, so that what is done again elsewhere in the same words is another history.
  chain = redis.sha1hex(chain .. '\n' .. seq .. '\n' .. now_s .. '\n' .. c.attempt .. '\n' .. changes)
  call('SET', P .. 'digest', chain)
  call('XADD', P .. 'log', 'MAXLEN', '~', maxlen, seq .. '-0', 'e', c.epoch, 'i', changes, 'h', chain)
  if tonumber(seq) % MARK == 0 then call('XADD', P .. 'marks', 'MAXLEN', '~', 65536, seq .. '-0', 'h', chain) end
  local all = table.concat(revisions, ';')
  if c.id ~= '' then
    -- An id of the future, by whose clock ever, is too old that much later.
    local ahead = math.min(math.max(c.minted - now, 0), ahead_ms)
    call('SET', receipt, c.digest .. '\n' .. seq .. '\n' .. now_s .. '\n' .. all .. '\n' .. c.result, 'PX', whole(tonumber(c.life) + ahead))
  end
  return { '', seq, all, chain }
end

local replies = {}
for i = 1, count do replies[i] = apply(parse()) end
return replies
